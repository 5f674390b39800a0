// Workspaces, their calls and planned steps for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace fiw::python {

void bind_workspace(nanobind::module_& module);

}  // namespace fiw::python
