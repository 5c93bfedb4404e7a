// The names of DeepStream's nvdsinfer.h and nvdsinfer_custom_impl.h that examples/deepstream uses, with their fields.

#pragma once

#include <vector>

constexpr unsigned NVDSINFER_MAX_DIMS = 8;

enum NvDsInferDataType { FLOAT = 0, HALF = 1, INT8 = 2, INT32 = 3 };

struct NvDsInferDims {
  unsigned int numDims;
  unsigned int d[NVDSINFER_MAX_DIMS];
  unsigned int numElements;
};

struct NvDsInferLayerInfo {
  NvDsInferDataType dataType;
  union {
    NvDsInferDims inferDims;
    NvDsInferDims dims;
  };
  int bindingIndex;
  const char* layerName;
  void* buffer;
  int isInput;
};

struct NvDsInferNetworkInfo {
  unsigned int width, height, channels;
};

struct NvDsInferParseDetectionParams {
  unsigned int numClassesConfigured;
  std::vector<float> perClassPreclusterThreshold;
  std::vector<float> perClassPostclusterThreshold;
};

struct NvDsInferObjectDetectionInfo {
  unsigned int classId;
  float left, top, width, height, detectionConfidence;
};
typedef NvDsInferObjectDetectionInfo NvDsInferParseObjectInfo;

typedef bool (*NvDsInferParseCustomFunc)(std::vector<NvDsInferLayerInfo> const&, NvDsInferNetworkInfo const&,
                                         NvDsInferParseDetectionParams const&, std::vector<NvDsInferParseObjectInfo>&);

#define CHECK_CUSTOM_PARSE_FUNC_PROTOTYPE(name) \
  static void check_##name(NvDsInferParseCustomFunc function = name) { check_##name(function); }
