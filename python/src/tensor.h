// Python objects as DLTensors, without a copy.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fiw/fiw.h"

namespace fiw::python {

/// A tensor imported through `__dlpack__`; holds on to the producer's memory for as long as it lives.
class Tensor {
 public:
  /// `name` is the argument's, for messages. `dtype`, unless empty, says what the elements are in place of the
  /// producer's word for them, at the same width. The producer orders its pending CUDA work before `stream`.
  Tensor(const char* name, const nanobind::object& object, const std::string& dtype, bool writable,
         std::intptr_t stream);
  ~Tensor();
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  const DLTensor* dl() const noexcept { return &dl_; }
  std::vector<std::int64_t> shape() const { return {dl_.shape, dl_.shape + dl_.ndim}; }
  std::string dtype() const;
  /// CUDA ordinal, -1: any other device.
  int device_index() const noexcept { return dl_.device.device_type == kDLCUDA ? dl_.device.device_id : -1; }
  bool read_only() const noexcept { return read_only_; }
  std::uintptr_t data() const noexcept { return reinterpret_cast<std::uintptr_t>(dl_.data) + dl_.byte_offset; }

 private:
  template <class Managed>
  bool adopt(const nanobind::object& capsule, const char* name, const char* used_name);

  DLTensor dl_{};
  bool read_only_ = false;
  void* managed_ = nullptr;
  void (*release_)(void* managed) = nullptr;
};

/// Null for None.
inline const DLTensor* dl_or_null(const Tensor* tensor) noexcept { return tensor == nullptr ? nullptr : tensor->dl(); }

/// The element type called `name` ("float32", "bfloat16", "float8_e4m3fn", ...); raises for an unknown one.
DLDataType element_type(const std::string& name);

void bind_tensor(nanobind::module_& module);

}  // namespace fiw::python
