// Max pooling after the stem: CUDA operators. Maps are (B, H, W, C).
#include "max_pool.h"

#include "row_tensors.h"

namespace {

rtdetr::Pool pool_of(const Tensor& x, int64_t height, int64_t width) {
  STD_TORCH_CHECK(x.dim() == 4 && x.numel() > 0 && x.size(3) % rtdetr::kRowAlignment == 0,
                  "x: expected maps (B, H, W, C), C a multiple of ", rtdetr::kRowAlignment, ", got ", shape_of(x));
  STD_TORCH_CHECK(x.size(0) * height * width * x.size(3) / 4 < int64_t(1) << 32, "x: expected fewer than 2^34 values");
  return {kernel_type(x), x.size(0), height, width, x.size(3), (height - 1) / 2 + 1, (width - 1) / 2 + 1};
}

std::tuple<Tensor, Tensor> max_pool(Tensor x) {
  x = ready(x);
  const rtdetr::Pool pool = pool_of(x, x.size(1), x.size(2));
  const std::vector<int64_t> shape{pool.images, pool.out_height, pool.out_width, pool.channels};
  Tensor y = torch::stable::new_empty(x, shape), place = torch::stable::new_empty(x, shape, ScalarType::Byte);
  run("max_pool", x, kernels::max_pool, pool, pointer(x), writable(y), writable<uint8_t>(place));
  return {y, place};
}

Tensor max_pool_backward(Tensor grad, Tensor place, int64_t height, int64_t width) {
  const rtdetr::Pool pool = pool_of(grad, height, width);
  const std::vector<int64_t> shape{pool.images, pool.out_height, pool.out_width, pool.channels};
  check_shape("grad", grad, shape);
  check_shape("place", place, shape);
  check_type("place", place, ScalarType::Byte, grad);
  grad = ready(grad), place = ready(place);
  Tensor by_x = torch::stable::new_empty(grad, {pool.images, height, width, pool.channels});
  run("max_pool_backward", grad, kernels::max_pool_backward, pool, pointer(grad), pointer<uint8_t>(place),
      writable(by_x));
  return by_x;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) {
  m.impl("max_pool", TORCH_BOX(&max_pool));
  m.impl("max_pool_backward", TORCH_BOX(&max_pool_backward));
}
