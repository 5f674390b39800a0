// See page_table.h.
#include "page_table.h"

#include <nanobind/ndarray.h>

#include <utility>

#include "error.h"
#include "tensor.h"

namespace fiw::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

using Indices = nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<1>>;

/// The handle that `function(fiw_page_table**, fiw_error*)` makes.
template <class Function>
fiw_page_table* make(Function&& function) {
  fiw_page_table* table = nullptr;
  call([&](fiw_error* error) { return function(&table, error); });
  return table;
}

PageTable copy(const PageTable& table) {
  return PageTable(
      make([&](fiw_page_table** out, fiw_error* error) { return fiw_page_table_copy(table.get(), out, error); }));
}

/// `advance(fiw_page_table*, fiw_error*)` on a copy, which then takes the table's place.
template <class Function>
void advance(PageTable& table, Function&& function) {
  PageTable next = copy(table);
  call([&](fiw_error* error) { return function(next.get(), error); });
  table = std::move(next);
}

/// A getter's array, which keeps the handle alive.
Indices view(const PageTable& table, const std::int32_t* (*getter)(const fiw_page_table*), std::size_t size) {
  auto* owner = new std::shared_ptr<fiw_page_table>(table.handle());
  const nb::capsule capsule(
      owner, [](void* pointer) noexcept { delete static_cast<std::shared_ptr<fiw_page_table>*>(pointer); });
  return {getter(owner->get()), {size}, capsule};
}

std::size_t batch(const PageTable& table) { return static_cast<std::size_t>(fiw_page_table_batch(table.get())); }

}  // namespace

void bind_page_table(nb::module_& module) {
  nb::class_<PageTable>(module, "PageTable", "A handle to a page table.")
      .def_static(
          "from_csr",
          [](std::int32_t page_size, std::int64_t num_pages, const Tensor& indptr, const Tensor& indices,
             const Tensor& last_page_len, const Tensor* kv_lens) {
            return PageTable(make([&](fiw_page_table** out, fiw_error* error) {
              return fiw_page_table_from_csr(page_size, num_pages, indptr.dl(), indices.dl(), last_page_len.dl(),
                                             dl_or_null(kv_lens), out, error);
            }));
          },
          "page_size"_a, "num_pages"_a, "indptr"_a, "indices"_a, "last_page_len"_a, "kv_lens"_a.none())
      .def_static(
          "from_pages",
          [](std::int32_t page_size, std::int64_t num_pages, const Tensor& pages, const Tensor& page_counts,
             const Tensor& kv_lens) {
            return PageTable(make([&](fiw_page_table** out, fiw_error* error) {
              return fiw_page_table_from_pages(page_size, num_pages, pages.dl(), page_counts.dl(), kv_lens.dl(), out,
                                               error);
            }));
          },
          "page_size"_a, "num_pages"_a, "pages"_a, "page_counts"_a, "kv_lens"_a)
      .def_static(
          "from_block_table",
          [](std::int32_t page_size, std::int64_t num_pages, const Tensor& blocks, const Tensor& kv_lens) {
            return PageTable(make([&](fiw_page_table** out, fiw_error* error) {
              return fiw_page_table_from_block_table(page_size, num_pages, blocks.dl(), kv_lens.dl(), out, error);
            }));
          },
          "page_size"_a, "num_pages"_a, "blocks"_a, "kv_lens"_a)
      .def(
          "to_block_table",
          [](const PageTable& table, std::int32_t pad, const Tensor& blocks, const Tensor& kv_lens) {
            call([&](fiw_error* error) {
              return fiw_page_table_to_block_table(table.get(), pad, blocks.dl(), kv_lens.dl(), error);
            });
          },
          "pad"_a, "blocks"_a, "kv_lens"_a)
      .def("copy", &copy)
      .def(
          "advance",
          [](PageTable& table, std::int32_t tokens, const Tensor* new_pages) {
            advance(table, [&](fiw_page_table* next, fiw_error* error) {
              return fiw_page_table_advance(next, tokens, dl_or_null(new_pages), error);
            });
          },
          "tokens"_a, "new_pages"_a.none())
      .def(
          "advance_each",
          [](PageTable& table, const Tensor& tokens, const Tensor* new_pages) {
            advance(table, [&](fiw_page_table* next, fiw_error* error) {
              return fiw_page_table_advance_each(next, tokens.dl(), dl_or_null(new_pages), error);
            });
          },
          "tokens"_a, "new_pages"_a.none())
      .def(
          "pages_needed",
          [](const PageTable& table, std::int32_t tokens) { return fiw_page_table_pages_needed(table.get(), tokens); },
          "tokens"_a)
      .def(
          "equals",
          [](const PageTable& table, const PageTable& other) {
            return fiw_page_table_equal(table.get(), other.get()) != 0;
          },
          "other"_a)
      .def_prop_ro("batch", [](const PageTable& table) { return fiw_page_table_batch(table.get()); })
      .def_prop_ro("page_size", [](const PageTable& table) { return fiw_page_table_page_size(table.get()); })
      .def_prop_ro("num_pages", [](const PageTable& table) { return fiw_page_table_num_pages(table.get()); })
      .def_prop_ro("total_kv", [](const PageTable& table) { return fiw_page_table_total_kv(table.get()); })
      .def_prop_ro("max_kv_len", [](const PageTable& table) { return fiw_page_table_max_kv_len(table.get()); })
      .def_prop_ro(
          "indptr", [](const PageTable& table) { return view(table, fiw_page_table_indptr, batch(table) + 1); },
          nb::rv_policy::reference)
      .def_prop_ro(
          "indices",
          [](const PageTable& table) {
            const auto used = static_cast<std::size_t>(fiw_page_table_indptr(table.get())[batch(table)]);
            return view(table, fiw_page_table_indices, used);
          },
          nb::rv_policy::reference)
      .def_prop_ro(
          "last_page_len",
          [](const PageTable& table) { return view(table, fiw_page_table_last_page_len, batch(table)); },
          nb::rv_policy::reference)
      .def_prop_ro(
          "page_counts", [](const PageTable& table) { return view(table, fiw_page_table_page_counts, batch(table)); },
          nb::rv_policy::reference)
      .def_prop_ro(
          "kv_lens", [](const PageTable& table) { return view(table, fiw_page_table_kv_lens, batch(table)); },
          nb::rv_policy::reference);
}

}  // namespace fiw::python
