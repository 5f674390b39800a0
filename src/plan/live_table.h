// What a page table that a captured graph reads must be, request by request: the rules of PageTable::from_csr.
#pragma once

#include <cstdint>

#include "fiw/error.h"
#include "plan/host_device.h"

namespace fiw {

struct LiveTable {
  const std::int32_t* indptr = nullptr;         ///< [batch + 1]
  const std::int32_t* indices = nullptr;        ///< [indptr[batch]]
  const std::int32_t* last_page_len = nullptr;  ///< [batch]
  std::int32_t page_size = 1;
  std::int32_t max_pages = 0;
  std::int64_t num_pages = 0;
};

/// kNone, or why request `request` is no good: `found` was there, `expected` is the limit.
struct LiveFault {
  Reason reason = Reason::kNone;
  std::int32_t request = 0;
  std::int32_t found = 0;
  std::int32_t expected = 0;
};

/// The faults of request r's indptr and last_page_len. Where there is none, in any request, its pages may be read.
FIW_HOST_DEVICE inline LiveFault check_extent(const LiveTable& table, std::int32_t r) {
  const std::int32_t begin = table.indptr[r];
  const std::int32_t end = table.indptr[r + 1];
  if (r == 0 && begin != 0) return {Reason::kIndptrStart, r, begin, 0};
  if (end < begin) return {Reason::kIndptrDecreasing, r, end, begin};
  if (end > table.max_pages) return {Reason::kTableSize, r, end, table.max_pages};
  const std::int32_t last = table.last_page_len[r];
  if (end > begin && (last < 1 || last > table.page_size)) return {Reason::kLastPageLen, r, last, table.page_size};
  return {};
}

FIW_HOST_DEVICE inline LiveFault check_page(const LiveTable& table, std::int32_t r, std::int32_t entry) {
  const std::int32_t page = table.indices[entry];
  if (page >= 0 && page < table.num_pages) return {};
  return {Reason::kPageIndex, r, page, static_cast<std::int32_t>(table.num_pages - 1)};
}

/// Tokens of request r, of a table without faults; those that 32 bits hold.
FIW_HOST_DEVICE inline std::int32_t live_kv_len(const LiveTable& table, std::int32_t r) {
  const std::int32_t pages = table.indptr[r + 1] - table.indptr[r];
  return pages == 0 ? 0 : (pages - 1) * table.page_size + table.last_page_len[r];
}

}  // namespace fiw
