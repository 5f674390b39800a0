// Graph sessions for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace fiw::python {

void bind_graph(nanobind::module_& module);

}  // namespace fiw::python
