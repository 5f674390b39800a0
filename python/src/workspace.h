// Workspaces, their calls and planned steps for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "fiw/fiw.h"

namespace fiw::python {

using Fields = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;

using Stream = std::intptr_t;
inline void* native(Stream stream) noexcept { return reinterpret_cast<void*>(stream); }

struct Workspace {
  std::shared_ptr<fiw_workspace> handle;
  fiw_workspace* get() const noexcept { return handle.get(); }
};

void bind_workspace(nanobind::module_& module);

}  // namespace fiw::python
