// See tensor.h.
#include "tensor.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>

#include "error.h"

namespace fiw::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

/// DLPack 1.0's capsule content, which older dlpack.h do not have.
struct VersionedTensor {
  struct {
    std::uint32_t major;
    std::uint32_t minor;
  } version;
  void* manager_ctx;
  void (*deleter)(VersionedTensor* self);
  std::uint64_t flags;
  DLTensor dl_tensor;
};
constexpr std::uint64_t kReadOnly = 1;

struct NamedType {
  const char* name;
  DLDataType dtype;
};
constexpr std::array<NamedType, 5> kElementTypes = {{
    {"float32", {kDLFloat, 32, 1}},
    {"float16", {kDLFloat, 16, 1}},
    {"bfloat16", {kDLBfloat, 16, 1}},
    {"float8_e4m3fn", {FIW_DL_FLOAT8_E4M3FN, 8, 1}},
    {"float8_e5m2", {FIW_DL_FLOAT8_E5M2, 8, 1}},
}};

bool operator==(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

/// `object.__dlpack__(...)`, asking for DLPack 1.0 from the producers that know of versions.
nb::object dlpack_capsule(const nb::object& object, std::intptr_t stream) {
  nb::dict options;
  if (nb::cast<int>(object.attr("__dlpack_device__")()[0]) == kDLCUDA) {
    options["stream"] = stream == 0 ? 1 : stream;  // 1: the legacy default stream; the protocol forbids 0
  }
  nb::dict versioned;
  versioned.update(options);
  versioned["max_version"] = nb::make_tuple(1, 0);
  try {
    return object.attr("__dlpack__")(**versioned);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return object.attr("__dlpack__")(**options);
}

}  // namespace

template <class Managed>
bool Tensor::adopt(const nb::object& capsule, const char* name, const char* used_name) {
  if (PyCapsule_IsValid(capsule.ptr(), name) == 0) return false;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if constexpr (requires { managed->version; }) {
    if (managed->version.major != 1) {
      raise_invalid(
          FIW_REASON_TENSOR_NULL,
          fmt::format("a tensor came as DLPack version {}, expected at most 1", managed->version.major).c_str());
    }
    read_only_ = (managed->flags & kReadOnly) != 0;
  }
  PyCapsule_SetName(capsule.ptr(), used_name);
  dl_ = managed->dl_tensor;
  managed_ = managed;
  release_ = [](void* tensor) {
    auto* typed = static_cast<Managed*>(tensor);
    if (typed->deleter != nullptr) typed->deleter(typed);
  };
  return true;
}

Tensor::Tensor(const char* name, const nb::object& object, const std::string& dtype, bool writable,
               std::intptr_t stream) {
  if (!nb::hasattr(object, "__dlpack__") || !nb::hasattr(object, "__dlpack_device__")) {
    throw nb::type_error(fmt::format("{} is of type {}, expected a tensor that has __dlpack__", name,
                                     nb::type_name(object.type()).c_str())
                             .c_str());
  }
  const nb::object capsule = dlpack_capsule(object, stream);
  if (!adopt<VersionedTensor>(capsule, "dltensor_versioned", "used_dltensor_versioned") &&
      !adopt<DLManagedTensor>(capsule, "dltensor", "used_dltensor")) {
    throw nb::type_error(fmt::format("{}: __dlpack__ returned no DLPack capsule", name).c_str());
  }
  // NumPy gives tensors without elements any strides, and no element is ever reached through them.
  if (std::any_of(dl_.shape, dl_.shape + dl_.ndim, [](std::int64_t extent) { return extent == 0; })) {
    dl_.strides = nullptr;
  }
  // A constructor that throws runs no destructor.
  try {
    if (writable && read_only_) {
      raise_invalid(FIW_REASON_OPTIONS, fmt::format("{} is read-only, expected a writable tensor", name).c_str());
    }
    if (!dtype.empty()) {
      const DLDataType element = element_type(dtype);
      if (dl_.dtype.bits * dl_.dtype.lanes != element.bits) {
        raise_invalid(FIW_REASON_TENSOR_DTYPE, fmt::format("{}: elements of {} bits, expected {} for {}", name,
                                                           dl_.dtype.bits * dl_.dtype.lanes, element.bits, dtype)
                                                   .c_str());
      }
      dl_.dtype = element;
    }
  } catch (...) {
    release_(managed_);
    throw;
  }
}

Tensor::~Tensor() { release_(managed_); }

std::string Tensor::dtype() const {
  for (const NamedType& type : kElementTypes) {
    if (type.dtype == dl_.dtype) return type.name;
  }
  return fmt::format("{{code {}, bits {}, lanes {}}}", dl_.dtype.code, dl_.dtype.bits, dl_.dtype.lanes);
}

DLDataType element_type(const std::string& name) {
  for (const NamedType& type : kElementTypes) {
    if (type.name == name) return type.dtype;
  }
  raise_invalid(
      FIW_REASON_TENSOR_DTYPE,
      fmt::format("dtype is {}, expected float32, float16, bfloat16, float8_e4m3fn or float8_e5m2", name).c_str());
}

void bind_tensor(nb::module_& module) {
  nb::class_<Tensor>(module, "Tensor", "A tensor imported through DLPack; keeps its producer's memory alive.")
      .def(nb::init<const char*, const nb::object&, const std::string&, bool, std::intptr_t>(), "name"_a, "object"_a,
           "dtype"_a = "", "writable"_a = false, "stream"_a = 0)
      .def_prop_ro("shape",
                   [](const Tensor& tensor) {
                     return nb::typed<nb::tuple, std::int64_t, nb::ellipsis>(nb::tuple(nb::cast(tensor.shape())));
                   })
      .def_prop_ro("dtype", &Tensor::dtype)
      .def_prop_ro("device_index", &Tensor::device_index)
      .def_prop_ro("read_only", &Tensor::read_only)
      .def_prop_ro("data", &Tensor::data);
}

}  // namespace fiw::python
