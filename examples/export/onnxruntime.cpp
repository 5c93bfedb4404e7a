// Runs an exported ONNX file with ONNX Runtime's C++ API, on an image in the PPM format (P6, made by
// `convert image.jpg image.ppm`), so that no image library is needed.
//
//   g++ -std=c++17 -O2 onnxruntime.cpp -I$ORT/include -L$ORT/lib -lonnxruntime -o detect
//   ./detect model.onnx image.ppm [threshold]
//
// $ORT: a release of https://github.com/microsoft/onnxruntime, unpacked. The boxes are those of `rtdetr predict`.

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

struct Image {
  int width = 0, height = 0;
  std::vector<uint8_t> pixels;  // height x width x 3, RGB
};

Image read_ppm(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string magic;
  int most = 0;
  Image image;
  file >> magic >> image.width >> image.height >> most;
  if (!file || magic != "P6" || most != 255) throw std::runtime_error(path + ": expected an 8-bit PPM file (P6)");
  file.get();
  image.pixels.resize(size_t(image.width) * image.height * 3);
  if (!file.read(reinterpret_cast<char*>(image.pixels.data()), image.pixels.size()))
    throw std::runtime_error(path + ": ends too early");
  return image;
}

struct Four {  // pixels that make one of another size
  std::array<int, 4> places;
  std::array<float, 4> weights;
};

// OpenCV's cubic filter along one side.
std::vector<Four> cubic(int size, int old_size) {
  auto inner = [](float x) { return (1.25f * x - 2.25f) * x * x + 1; };
  auto outer = [](float x) { return ((-0.75f * x + 3.75f) * x - 6) * x + 3; };
  std::vector<Four> all(size);
  for (int i = 0; i < size; ++i) {
    const float at = (i + 0.5f) * old_size / size - 0.5f, first = std::floor(at), t = at - first;
    all[i].weights = {outer(1 + t), inner(t), inner(1 - t), outer(2 - t)};
    for (int k = 0; k < 4; ++k) all[i].places[k] = std::clamp(int(first) + k - 1, 0, old_size - 1);
  }
  return all;
}

// (3, height, width), by the filter of training.
std::vector<uint8_t> resized(const Image& from, int height, int width) {
  const auto down = cubic(height, from.height), across = cubic(width, from.width);
  std::vector<float> rows(size_t(from.height) * width * 3);
  for (int y = 0; y < from.height; ++y)
    for (int x = 0; x < width; ++x)
      for (int k = 0; k < 4; ++k)
        for (int c = 0; c < 3; ++c)
          rows[(size_t(y) * width + x) * 3 + c] +=
              across[x].weights[k] * from.pixels[(size_t(y) * from.width + across[x].places[k]) * 3 + c];
  std::vector<uint8_t> to(size_t(3) * height * width);
  for (int y = 0; y < height; ++y)
    for (int x = 0; x < width; ++x)
      for (int c = 0; c < 3; ++c) {
        float sum = 0;
        for (int k = 0; k < 4; ++k) sum += down[y].weights[k] * rows[(size_t(down[y].places[k]) * width + x) * 3 + c];
        to[(size_t(c) * height + y) * width + x] = uint8_t(std::lround(std::clamp(sum, 0.0f, 255.0f)));
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
  if (argc < 3) throw std::runtime_error("usage: detect model.onnx image.ppm [threshold]");
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
  if (preprocess.find("\"resize\": \"OpenCV cubic") == std::string::npos)
    throw std::runtime_error("expected a model of images resized with OpenCV's cubic filter, the only one here");
  const auto names = strings(about("names"));
  const auto [height, width] = input_size(preprocess);
  const Image image = read_ppm(argv[2]);

  auto pixels = resized(image, height, width);
  std::array<int64_t, 2> sizes{image.height, image.width};
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
