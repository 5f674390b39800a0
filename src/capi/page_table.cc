// Page tables in C.
#include "fiw/page_table.h"

#include <algorithm>
#include <vector>

#include "capi/convert.h"
#include "core/support.h"

namespace {

namespace capi = fiw::capi;
using fiw::PageTable;
using fiw::Reason;

PageTable& mutable_table(fiw_page_table* table) {
  if (table == nullptr) fiw::fail(Reason::kTableNull, "table is null, expected a page table");
  return table->table;
}

fiw_page_table* make_handle(const PageTable& table) { return new fiw_page_table{table}; }

/// Cuts the concatenated lists of pages into one list a request.
std::vector<std::vector<std::int32_t>> cut(std::span<const std::int32_t> pages, std::span<const std::int32_t> counts) {
  std::vector<std::vector<std::int32_t>> lists(counts.size());
  std::size_t next = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    if (counts[r] < 0) {
      fiw::fail_at(r, Reason::kIndicesLength, "request {}: page_counts is {}, expected at least 0", r, counts[r]);
    }
    const auto count = static_cast<std::size_t>(counts[r]);
    if (count > pages.size() - next) {
      fiw::fail_at(r, Reason::kIndicesLength, "request {}: page_counts is {}, but only {} of {} pages are left", r,
                   counts[r], pages.size() - next, pages.size());
    }
    const auto list = pages.subspan(next, count);
    lists[r].assign(list.begin(), list.end());
    next += count;
  }
  if (next != pages.size()) {
    fiw::fail(Reason::kIndicesLength, "pages has {} entries, page_counts adds up to {}", pages.size(), next);
  }
  return lists;
}

}  // namespace

fiw_status fiw_page_table_from_csr(int32_t page_size, int64_t num_pages, const DLTensor* indptr,
                                   const DLTensor* indices, const DLTensor* last_page_len, const DLTensor* kv_lens,
                                   fiw_page_table** out, fiw_error* err) {
  return capi::hand_out(out, err, [&] {
    const auto starts = capi::host_indices("indptr", indptr);
    const auto pages = capi::host_indices("indices", indices);
    const auto last = capi::host_indices("last_page_len", last_page_len);
    const auto lengths = capi::optional_host_indices("kv_lens", kv_lens);
    // An empty span means "not given" to from_csr, so a given array is measured here.
    if (kv_lens != nullptr && lengths.size() != last.size()) {
      fiw::fail(Reason::kKvLens, "kv_lens has {} entries, expected {}, as last_page_len", lengths.size(), last.size());
    }
    return make_handle(PageTable::from_csr(page_size, num_pages, starts, pages, last, lengths));
  });
}

fiw_status fiw_page_table_from_pages(int32_t page_size, int64_t num_pages, const DLTensor* pages,
                                     const DLTensor* page_counts, const DLTensor* kv_lens, fiw_page_table** out,
                                     fiw_error* err) {
  return capi::hand_out(out, err, [&] {
    const auto lists = cut(capi::host_indices("pages", pages), capi::host_indices("page_counts", page_counts));
    return make_handle(PageTable::from_pages(page_size, num_pages, lists, capi::host_indices("kv_lens", kv_lens)));
  });
}

fiw_status fiw_page_table_from_block_table(int32_t page_size, int64_t num_pages, const DLTensor* blocks,
                                           const DLTensor* kv_lens, fiw_page_table** out, fiw_error* err) {
  return capi::hand_out(out, err, [&] {
    const capi::IndexMatrix rows = capi::host_index_matrix("blocks", blocks);
    const auto lengths = capi::host_indices("kv_lens", kv_lens);
    if (static_cast<std::int64_t>(lengths.size()) != rows.rows) {
      fiw::fail(Reason::kBatch, "kv_lens has {} entries, expected {}, the rows of blocks", lengths.size(), rows.rows);
    }
    // Only the entries that a request uses are read: what lies behind them need not even exist.
    std::vector<std::vector<std::int32_t>> lists(lengths.size());
    for (std::size_t r = 0; page_size > 0 && r < lists.size(); ++r) {
      const std::int64_t needed = (std::int64_t{std::max(lengths[r], 0)} + page_size - 1) / page_size;
      const std::int64_t used = std::min(needed, rows.columns);
      if (used == 0) continue;
      const std::int32_t* row = rows.data + static_cast<std::int64_t>(r) * rows.row_stride;
      lists[r].assign(row, row + used);
    }
    return make_handle(PageTable::from_pages(page_size, num_pages, lists, lengths));
  });
}

fiw_status fiw_page_table_from_device(fiw_workspace* ws, const fiw_device_page_table* table, fiw_page_table** out,
                                      void* stream, fiw_error* err) {
  return capi::hand_out(ws, out, err, [&](fiw::FlashInferWorkspace& workspace) {
    return make_handle(workspace.read_table(capi::device_page_table("table", table, workspace.device_index()), stream));
  });
}

fiw_status fiw_page_table_to_block_table(const fiw_page_table* table, int32_t pad, const DLTensor* blocks,
                                         const DLTensor* kv_lens, fiw_error* err) {
  return capi::guard(err, [&] {
    const PageTable& from = capi::page_table(table);
    const capi::IndexMatrix rows = capi::host_index_matrix("blocks", blocks);
    const auto lengths = capi::optional_host_indices("kv_lens", kv_lens);
    const auto counts = from.page_counts();
    const std::int32_t needed = counts.empty() ? 0 : std::ranges::max(counts);
    if (rows.rows != from.batch() || rows.columns < needed) {
      fiw::fail(Reason::kTensorShape, "blocks: shape [{}, {}], expected [{}, at least {}]", rows.rows, rows.columns,
                from.batch(), needed);
    }
    if (kv_lens != nullptr && static_cast<std::int64_t>(lengths.size()) != from.batch()) {
      fiw::fail(Reason::kTensorShape, "kv_lens: shape [{}], expected [{}]", lengths.size(), from.batch());
    }
    const fiw::Region written{
        "blocks", rows.data, sizeof(std::int32_t), rows.columns, {{"row", rows.rows, rows.row_stride}}};
    fiw::support::check_apart(
        {"kv_lens", lengths.data(), sizeof(std::int32_t), static_cast<std::int64_t>(lengths.size())}, written);
    const fiw::BlockTable padded = from.to_block_table(static_cast<std::int32_t>(rows.columns), pad);
    for (std::int64_t r = 0; rows.columns > 0 && r < rows.rows; ++r) {
      std::copy_n(padded.blocks.data() + r * rows.columns, rows.columns, rows.data + r * rows.row_stride);
    }
    if (kv_lens != nullptr) std::ranges::copy(padded.kv_lens, lengths.begin());
  });
}

fiw_status fiw_page_table_copy(const fiw_page_table* table, fiw_page_table** out, fiw_error* err) {
  return capi::hand_out(out, err, [&] { return make_handle(capi::page_table(table)); });
}

fiw_status fiw_page_table_advance(fiw_page_table* table, int32_t tokens, const DLTensor* new_pages, fiw_error* err) {
  return capi::guard(err, [&] {
    PageTable& grown = mutable_table(table);
    grown.advance(tokens, capi::optional_host_indices("new_pages", new_pages));
  });
}

fiw_status fiw_page_table_advance_each(fiw_page_table* table, const DLTensor* tokens, const DLTensor* new_pages,
                                       fiw_error* err) {
  return capi::guard(err, [&] {
    PageTable& grown = mutable_table(table);
    const std::span<const std::int32_t> growth = capi::host_indices("tokens", tokens);
    grown.advance(growth, capi::optional_host_indices("new_pages", new_pages));
  });
}

void fiw_page_table_free(fiw_page_table* table) { delete table; }

int64_t fiw_page_table_pages_needed(const fiw_page_table* table, int32_t tokens) {
  return table == nullptr ? 0 : table->table.pages_needed(tokens);
}

int32_t fiw_page_table_batch(const fiw_page_table* table) { return table == nullptr ? 0 : table->table.batch(); }

int32_t fiw_page_table_page_size(const fiw_page_table* table) {
  return table == nullptr ? 0 : table->table.page_size();
}

int64_t fiw_page_table_num_pages(const fiw_page_table* table) {
  return table == nullptr ? 0 : table->table.num_pages();
}

int64_t fiw_page_table_total_kv(const fiw_page_table* table) { return table == nullptr ? 0 : table->table.total_kv(); }

int32_t fiw_page_table_max_kv_len(const fiw_page_table* table) {
  return table == nullptr ? 0 : table->table.max_kv_len();
}

const int32_t* fiw_page_table_indptr(const fiw_page_table* table) {
  return table == nullptr ? nullptr : table->table.indptr().data();
}

const int32_t* fiw_page_table_indices(const fiw_page_table* table) {
  return table == nullptr ? nullptr : table->table.indices().data();
}

const int32_t* fiw_page_table_last_page_len(const fiw_page_table* table) {
  return table == nullptr ? nullptr : table->table.last_page_len().data();
}

const int32_t* fiw_page_table_page_counts(const fiw_page_table* table) {
  return table == nullptr ? nullptr : table->table.page_counts().data();
}

const int32_t* fiw_page_table_kv_lens(const fiw_page_table* table) {
  return table == nullptr ? nullptr : table->table.kv_lens().data();
}

int32_t fiw_page_table_equal(const fiw_page_table* a, const fiw_page_table* b) {
  if (a == nullptr || b == nullptr) return a == b ? 1 : 0;
  return a->table == b->table ? 1 : 0;
}
