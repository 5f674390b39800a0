// Page tables for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "fiw/fiw.h"

namespace fiw::python {

/// A page table for calls that run without the GIL: advancing it puts a new handle in place, so that a call in another
/// thread, and the arrays handed out before, keep the one they started with.
class PageTable {
 public:
  explicit PageTable(fiw_page_table* owned) : handle_(owned, fiw_page_table_free) {}
  std::shared_ptr<fiw_page_table> handle() const noexcept { return handle_; }
  fiw_page_table* get() const noexcept { return handle_.get(); }

 private:
  std::shared_ptr<fiw_page_table> handle_;
};

void bind_page_table(nanobind::module_& module);

}  // namespace fiw::python
