// fiw._fiw: the C ABI for the Python sources in python/fiw/, which add defaults, allocation and documentation.
#include <nanobind/nanobind.h>

#include "attention.h"
#include "graph.h"
#include "page_table.h"
#include "tensor.h"
#include "workspace.h"

NB_MODULE(_fiw, module) {
  module.doc() = "The C ABI of flashinfer-workspace. Use the package `fiw`, not this module.";
  fiw::python::bind_tensor(module);
  fiw::python::bind_page_table(module);
  fiw::python::bind_attention(module);
  fiw::python::bind_workspace(module);
  fiw::python::bind_graph(module);
}
