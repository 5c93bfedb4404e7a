// The dispatcher side of exchanges between processes, like top_k.cpp: _cpu.so declares the schemas, _cuda.so brings the
// kernel. Addresses of memory travel as integers.
#include "exchange.h"

#include "row_tensors.h"

#ifdef RTDETR_LIBRARY_CUDA
namespace {

uint8_t* handle_of(const Tensor& handle) {
  STD_TORCH_CHECK(handle.is_cpu() && handle.scalar_type() == ScalarType::Byte && handle.is_contiguous(),
                  "handle: expected contiguous bytes on the processor");
  check_shape("handle", handle, {rtdetr::kHandleBytes});
  return static_cast<uint8_t*>(handle.mutable_data_ptr());
}

int64_t make_inbox(Tensor done, Tensor handle, int64_t processes) {
  void* inbox = nullptr;
  torch::stable::accelerator::DeviceGuard guard(done.get_device_index());
  const char* error = rtdetr::cuda::make_inbox(processes, &inbox, handle_of(handle));
  STD_TORCH_CHECK(error == nullptr, "make_inbox: ", error);
  return reinterpret_cast<int64_t>(inbox);
}

int64_t open_inbox(Tensor done, Tensor handle) {
  void* inbox = nullptr;
  torch::stable::accelerator::DeviceGuard guard(done.get_device_index());
  const char* error = rtdetr::cuda::open_inbox(handle_of(handle), &inbox);
  STD_TORCH_CHECK(error == nullptr, "open_inbox: ", error);
  return reinterpret_cast<int64_t>(inbox);
}

Tensor exchange(Tensor own, Tensor done, std::vector<int64_t> inboxes, int64_t rank, bool mean, int64_t seconds) {
  const auto processes = static_cast<int64_t>(inboxes.size());
  STD_TORCH_CHECK(processes <= rtdetr::kMaxProcesses && 0 <= rank && rank < processes, "inboxes: expected 1 to ",
                  rtdetr::kMaxProcesses, " and a rank among them, got ", processes, " and ", rank);
  STD_TORCH_CHECK(own.is_contiguous() && own.numel() <= rtdetr::kMaxExchanged, "own: expected at most ", rtdetr::kMaxExchanged,
                  " numbers, contiguous, got ", shape_of(own));
  check_type("own", own, ScalarType::Float, done);
  check_type("done", done, ScalarType::Int, own);
  rtdetr::Exchange among{processes, rank, {}, static_cast<uint32_t*>(done.mutable_data_ptr())};
  for (int64_t i = 0; i < processes; ++i) among.inboxes[i] = reinterpret_cast<uint64_t*>(inboxes[i]);
  std::vector<int64_t> shape(own.sizes().begin(), own.sizes().end());
  if (!mean) shape.insert(shape.begin(), processes);
  Tensor result = torch::stable::new_empty(own, shape);
  torch::stable::accelerator::DeviceGuard guard(own.get_device_index());
  const char* error = rtdetr::cuda::exchange(among, static_cast<const float*>(pointer(own)), own.numel(), mean, seconds,
                                             writable(result), current_stream(own));
  STD_TORCH_CHECK(error == nullptr, "exchange: ", error);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) {
  m.impl("make_inbox", TORCH_BOX(&make_inbox));
  m.impl("open_inbox", TORCH_BOX(&open_inbox));
  m.impl("exchange", TORCH_BOX(&exchange));
}
#else
STABLE_TORCH_LIBRARY_FRAGMENT(rtdetr, m) {
  m.def("make_inbox(Tensor done, Tensor(a!) handle, int processes) -> int");
  m.def("open_inbox(Tensor done, Tensor handle) -> int");
  m.def("exchange(Tensor own, Tensor(a!) done, int[] inboxes, int rank, bool mean, int seconds) -> Tensor");
}
#endif
