// Runs an AOTInductor package (`rtdetr export --format aot`) with libtorch alone: neither Python nor our code.
//
//   T=$(python -c "import torch; print(torch.__path__[0])")
//   g++ -std=c++20 -O1 aot.cpp -I$T/include -L$T/lib -Wl,-rpath,$T/lib
//       -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -ldl -o aot
//   ./aot model.aot.pt2 model.aot.ops.so        (the second one where the export wrote it)
//
// It feeds one grey image and prints the best detection. Images of your own have to be contiguous: the package reads
// them as they lie in memory and checks nothing.

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: aot model.aot.pt2 [model.aot.ops.so]\n";
    return 2;
  }
  if (argc > 2 && !dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL)) {  // declares the deformable op
    std::cerr << "error: " << dlerror() << "\n";
    return 1;
  }
  const c10::InferenceMode no_gradients;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const auto images = at::full({1, 3, 96, 128}, 127, at::kByte);
  const auto sizes = at::tensor({96, 128}, at::kLong).reshape({1, 2});
  const auto outputs = model.run({images, sizes});  // labels, boxes, scores
  std::cout << "label " << outputs[0][0][0].item<int64_t>() << " score " << outputs[2][0][0].item<float>() << " box "
            << outputs[1][0][0].reshape({1, 4}) << "\n";
  return 0;
}
