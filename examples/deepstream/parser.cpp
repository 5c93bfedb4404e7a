// Bounding box parser for DeepStream's nvinfer, of a file of
//
//     rtdetr export best.pth --portable --raw --input float
//
// which takes float32 images in [0, 1] and gives `logits` (Q, C) and `boxes` (Q, 4), cx cy w h relative to the image.
// The best (query, class) pairs are taken here, without NMS: cluster-mode=4. See config_infer.txt beside this file.
//
//     g++ -O2 -shared -fPIC -std=c++17 parser.cpp -I/opt/nvidia/deepstream/deepstream/sources/includes -o libparser.so

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <vector>

#include "nvdsinfer_custom_impl.h"

namespace {

const NvDsInferLayerInfo* layer(const std::vector<NvDsInferLayerInfo>& layers, const char* name) {
  for (const auto& each : layers)
    if (each.layerName && !std::strcmp(each.layerName, name)) return &each;
  std::cerr << "the model has no output `" << name << "`; export it with --raw\n";
  return nullptr;
}

// A NaN stays none that is found: every comparison with it is false.
float inside(float value, float size) { return std::min(std::max(value, 0.0f), size); }

}  // namespace

extern "C" bool NvDsInferParseRtdetr(std::vector<NvDsInferLayerInfo> const& layers, NvDsInferNetworkInfo const& network,
                                     NvDsInferParseDetectionParams const& parameters,
                                     std::vector<NvDsInferParseObjectInfo>& objects) {
  const auto *logits = layer(layers, "logits"), *boxes = layer(layers, "boxes");
  if (!logits || !boxes) return false;
  if (logits->dataType != FLOAT || boxes->dataType != FLOAT || logits->inferDims.numDims != 2 ||
      boxes->inferDims.numDims != 2 || boxes->inferDims.d[1] != 4 || boxes->inferDims.d[0] != logits->inferDims.d[0]) {
    std::cerr << "expected logits (Q, C) and boxes (Q, 4) in float32\n";
    return false;
  }
  const unsigned queries = logits->inferDims.d[0], classes = logits->inferDims.d[1];
  if (parameters.numClassesConfigured != classes) {
    std::cerr << "num-detected-classes: expected " << classes << ", got " << parameters.numClassesConfigured << "\n";
    return false;
  }
  const auto* logit = static_cast<const float*>(logits->buffer);
  const auto* box = static_cast<const float*>(boxes->buffer);
  const float width = network.width, height = network.height;
  objects.clear();
  for (unsigned query = 0; query < queries; ++query, box += 4) {
    for (unsigned c = 0; c < classes; ++c) {
      const float score = 1 / (1 + std::exp(-logit[query * classes + c]));
      if (!(score >= parameters.perClassPreclusterThreshold[c])) continue;
      const float left = inside((box[0] - box[2] / 2) * width, width);
      const float right = inside((box[0] + box[2] / 2) * width, width);
      const float top = inside((box[1] - box[3] / 2) * height, height);
      const float bottom = inside((box[1] + box[3] / 2) * height, height);
      if (!(right > left) || !(bottom > top)) continue;
      NvDsInferParseObjectInfo found{};
      found.classId = c;
      found.left = left, found.top = top, found.width = right - left, found.height = bottom - top;
      found.detectionConfidence = score;
      objects.push_back(found);
    }
  }
  std::stable_sort(objects.begin(), objects.end(),
                   [](const auto& a, const auto& b) { return a.detectionConfidence > b.detectionConfidence; });
  return true;
}

CHECK_CUSTOM_PARSE_FUNC_PROTOTYPE(NvDsInferParseRtdetr);
