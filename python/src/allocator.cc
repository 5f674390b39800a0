// See allocator.h.
#include "allocator.h"

#include <cstdint>

#include "error.h"

namespace fiw::python {
namespace {

namespace nb = nanobind;

void* allocate_memory(void* context, std::size_t bytes, std::size_t alignment, void* stream) {
  const nb::gil_scoped_acquire locked;
  try {
    const nb::object address =
        static_cast<Allocator*>(context)->allocate(bytes, alignment, reinterpret_cast<std::uintptr_t>(stream));
    if (address.is_none()) return nullptr;
    void* const memory = PyLong_AsVoidPtr(address.ptr());
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return memory;
  } catch (nb::python_error& error) {
    blame(nb::borrow(error.value()));
    return nullptr;
  }
}

void free_memory(void* context, void* memory, std::size_t bytes, void* stream) {
  if (!Py_IsInitialized()) return;  // at the end of the process, which frees all
  const nb::gil_scoped_acquire locked;
  try {
    static_cast<Allocator*>(context)->free(reinterpret_cast<std::uintptr_t>(memory), bytes,
                                           reinterpret_cast<std::uintptr_t>(stream));
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("fiw: the allocator's free");
  }
}

}  // namespace

fiw_allocator Allocator::callbacks() noexcept { return {sizeof(fiw_allocator), allocate_memory, free_memory, this}; }

}  // namespace fiw::python
