// Runs an exported ONNX file with ONNX Runtime's C++ API, on a picture in the PPM format (P6, made by
// `convert picture.jpg picture.ppm`), so that no picture library is needed.
//
//   g++ -std=c++17 -O2 onnxruntime.cpp -I$ORT/include -L$ORT/lib -lonnxruntime -o detect
//   ./detect model.onnx picture.ppm [threshold]
//
// $ORT: a release of https://github.com/microsoft/onnxruntime, unpacked. The picture is shrunk bilinearly, not by
// OpenCV's cubic filter as in training, so scores differ a little; resize with OpenCV where they must not.

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

struct Picture {
  int width = 0, height = 0;
  std::vector<uint8_t> pixels;  // height x width x 3, RGB
};

Picture read_ppm(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string magic;
  int most = 0;
  Picture picture;
  file >> magic >> picture.width >> picture.height >> most;
  if (!file || magic != "P6" || most != 255) throw std::runtime_error(path + ": expected an 8-bit PPM file (P6)");
  file.get();
  picture.pixels.resize(size_t(picture.width) * picture.height * 3);
  if (!file.read(reinterpret_cast<char*>(picture.pixels.data()), picture.pixels.size()))
    throw std::runtime_error(path + ": ends too early");
  return picture;
}

// (3, height, width), bilinear between the centres of the pixels.
std::vector<uint8_t> resized(const Picture& from, int height, int width) {
  std::vector<uint8_t> to(size_t(3) * height * width);
  auto place = [](int i, int size, int old_size, int& first, int& second) {
    const float at = std::clamp((i + 0.5f) * old_size / size - 0.5f, 0.0f, float(old_size - 1));
    first = int(at);
    second = std::min(first + 1, old_size - 1);
    return at - first;
  };
  for (int y = 0; y < height; ++y) {
    int y0, y1;
    const float fy = place(y, height, from.height, y0, y1);
    for (int x = 0; x < width; ++x) {
      int x0, x1;
      const float fx = place(x, width, from.width, x0, x1);
      for (int c = 0; c < 3; ++c) {
        auto at = [&](int row, int column) {
          return float(from.pixels[(size_t(row) * from.width + column) * 3 + c]);
        };
        const float top = at(y0, x0) * (1 - fx) + at(y0, x1) * fx;
        const float bottom = at(y1, x0) * (1 - fx) + at(y1, x1) * fx;
        to[(size_t(c) * height + y) * width + x] = uint8_t(std::lround(top * (1 - fy) + bottom * fy));
      }
    }
  }
  return to;
}

// The two numbers of "size": [h, w] in the file's metadata.
std::array<int, 2> input_size(const std::string& preprocess) {
  std::array<int, 2> size{};
  const auto at = preprocess.find("\"size\": [");
  if (at == std::string::npos || std::sscanf(preprocess.c_str() + at, "\"size\": [%d, %d]", &size[0], &size[1]) != 2)
    throw std::runtime_error("the file does not say its size; was it written by `rtdetr export`?");
  return size;
}

// Names out of a JSON list of strings.
std::vector<std::string> strings(const std::string& json) {
  std::vector<std::string> found;
  for (size_t i = 0; i < json.size(); ++i) {
    if (json[i] != '"') continue;
    std::string text;
    for (++i; i < json.size() && json[i] != '"'; ++i) text += json[i] == '\\' ? json[++i] : json[i];
    found.push_back(text);
  }
  return found;
}

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("usage: detect model.onnx picture.ppm [threshold]");
  const float threshold = argc > 3 ? std::atof(argv[3]) : 0.5f;
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "rtdetr");
  Ort::Session session(env, argv[1], Ort::SessionOptions{});
  Ort::AllocatorWithDefaultOptions allocator;
  auto about = [&](const char* key) {
    auto value = session.GetModelMetadata().LookupCustomMetadataMapAllocated(key, allocator);
    return value ? std::string(value.get()) : std::string();
  };
  const std::string preprocess = about("preprocess");
  if (about("outputs") != "detections" || preprocess.find("\"input\": \"uint8\"") == std::string::npos)
    throw std::runtime_error("expected a file of `rtdetr export` with detections and uint8 input");
  const auto names = strings(about("names"));
  const auto [height, width] = input_size(preprocess);
  const Picture picture = read_ppm(argv[2]);

  auto pixels = resized(picture, height, width);
  std::array<int64_t, 2> sizes{picture.height, picture.width};
  const std::array<int64_t, 4> images_shape{1, 3, height, width};
  const std::array<int64_t, 2> sizes_shape{1, 2};
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::array<Ort::Value, 2> inputs{
      Ort::Value::CreateTensor<uint8_t>(memory, pixels.data(), pixels.size(), images_shape.data(), images_shape.size()),
      Ort::Value::CreateTensor<int64_t>(memory, sizes.data(), sizes.size(), sizes_shape.data(), sizes_shape.size())};
  const std::array<const char*, 2> input_names{"images", "sizes"};
  const std::array<const char*, 3> output_names{"labels", "boxes", "scores"};
  auto outputs = session.Run(Ort::RunOptions{}, input_names.data(), inputs.data(), inputs.size(), output_names.data(),
                             output_names.size());

  const auto count = outputs[2].GetTensorTypeAndShapeInfo().GetShape()[1];
  const int64_t* labels = outputs[0].GetTensorData<int64_t>();
  const float* boxes = outputs[1].GetTensorData<float>();
  const float* scores = outputs[2].GetTensorData<float>();
  for (int64_t i = 0; i < count && scores[i] >= threshold; ++i) {
    const float* box = boxes + 4 * i;
    std::printf("%s %.4f %.1f %.1f %.1f %.1f\n", names.at(labels[i]).c_str(), scores[i], box[0], box[1], box[2], box[3]);
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
