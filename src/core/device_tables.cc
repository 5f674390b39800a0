// See device_tables.h.
#include "core/device_tables.h"

#include <algorithm>
#include <array>
#include <limits>

#include "core/fail.h"
#include "core/support.h"

namespace fiw {
namespace {

using Array = std::span<const std::int32_t>;

bool same_array(Array a, Array b) noexcept { return a.data() == b.data() && a.size() == b.size(); }

bool same_arrays(const DevicePageTable& a, const DevicePageTable& b) noexcept {
  return same_array(a.indptr, b.indptr) && same_array(a.indices, b.indices) &&
         same_array(a.last_page_len, b.last_page_len);
}

bool vouched(const DevicePageTable& a, const DevicePageTable& b) noexcept {
  return a.version != 0 && a.version == b.version && a.page_size == b.page_size && a.num_pages == b.num_pages &&
         same_arrays(a, b);
}

void check_array(const char* name, Array array) {
  if (array.data() == nullptr && !array.empty()) {
    fail(Reason::kTableNull, "{} is null, expected {} entries", name, array.size());
  }
  if (array.size() > std::size_t{std::numeric_limits<std::int32_t>::max()}) {
    fail(Reason::kTableSize, "{} has {} entries, more than int32 holds", name, array.size());
  }
}

void check_arrays(const DevicePageTable& table) {
  support::check_pool(table.page_size, table.num_pages);
  check_array("indptr", table.indptr);
  check_array("indices", table.indices);
  check_array("last_page_len", table.last_page_len);
  if (table.indptr.size() != table.last_page_len.size() + 1) {
    fail(Reason::kIndptrLength, "indptr has {} entries, expected batch + 1 = {} (last_page_len has {})",
         table.indptr.size(), table.last_page_len.size() + 1, table.last_page_len.size());
  }
}

}  // namespace

PageTable DeviceTables::read(Backend& backend, const DevicePageTable& table, Stream stream) {
  check_arrays(table);
  for (Entry& entry : entries_) {
    if (!vouched(entry.source, table)) continue;
    entry.last_used = ++clock_;
    ++known_;
    return entry.table;
  }
  const PageTable fresh = fetch(backend, table, stream);
  ++copied_;
  for (Entry& entry : entries_) {
    if (same_arrays(entry.source, table)) entry.source.version = 0;  // overwritten since
  }
  for (Entry& entry : entries_) {
    if (entry.table != fresh || entry.table.num_pages() != fresh.num_pages()) continue;
    entry.source = table;
    entry.last_used = ++clock_;
    return entry.table;
  }
  if (entries_.size() < max_entries_) {
    entries_.push_back({table, fresh, ++clock_});
  } else {
    *std::ranges::min_element(entries_, {}, &Entry::last_used) = {table, fresh, ++clock_};
  }
  return fresh;
}

PageTable DeviceTables::fetch(Backend& backend, const DevicePageTable& table, Stream stream) {
  const std::array arrays = {table.indptr, table.indices, table.last_page_len};
  words_.resize(table.indptr.size() + table.indices.size() + table.last_page_len.size());
  std::array<HostCopy, arrays.size()> copies;
  std::array<Array, arrays.size()> host;
  std::span<std::int32_t> left = words_;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const std::span<std::int32_t> to = left.first(arrays[i].size());
    left = left.subspan(to.size());
    copies[i] = {std::as_writable_bytes(to), arrays[i].data()};
    host[i] = to;
  }
  backend.fetch(copies, stream);

  const auto& [indptr, indices, last_page_len] = host;
  const std::int32_t used = indptr.back();
  if (used >= 0 && static_cast<std::size_t>(used) > indices.size()) {
    fail(Reason::kIndicesLength, "indices has {} entries, expected at least indptr[{}] = {}", indices.size(),
         last_page_len.size(), used);
  }
  return PageTable::from_csr(table.page_size, table.num_pages, indptr,
                             indices.first(static_cast<std::size_t>(std::max(used, 0))), last_page_len);
}

}  // namespace fiw
