// Workspaces, their calls and planned steps for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "allocator.h"
#include "fiw/fiw.h"

namespace fiw::python {

using Fields = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;

using Stream = std::intptr_t;
inline void* native(Stream stream) noexcept { return reinterpret_cast<void*>(stream); }

struct Workspace {
  std::shared_ptr<Allocator> allocator;  ///< null: the backend's own
  std::shared_ptr<fiw_workspace> handle;
  fiw_workspace* get() const noexcept { return handle.get(); }
};

/// The deleter of a handle, which may have to wait for another thread's call.
template <auto free>
struct FreeUnlocked {
  template <class Handle>
  void operator()(Handle* handle) const {
    const nanobind::gil_scoped_release unlocked;
    free(handle);
  }
};

void bind_workspace(nanobind::module_& module);

}  // namespace fiw::python
