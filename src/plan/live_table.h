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

/// Tokens of a request with that many pages, `last` of them in the last one.
FIW_HOST_DEVICE inline std::int64_t count_tokens(std::int32_t pages, std::int32_t page_size, std::int32_t last) {
  return pages == 0 ? 0 : (pages - std::int64_t{1}) * page_size + last;
}

/// The faults of request r, whose pages are entries [begin, end). Where there is none, in any request, its pages may be
/// read.
FIW_HOST_DEVICE inline LiveFault check_extent(const LiveTable& table, std::int32_t r, std::int32_t begin,
                                              std::int32_t end, std::int32_t last) {
  if (r == 0 && begin != 0) return {Reason::kIndptrStart, r, begin, 0};
  if (end < begin) return {Reason::kIndptrDecreasing, r, end, begin};
  if (end > table.max_pages) return {Reason::kTableSize, r, end, table.max_pages};
  if (end > begin && (last < 1 || last > table.page_size)) return {Reason::kLastPageLen, r, last, table.page_size};
  if (count_tokens(end - begin, table.page_size, last) > INT32_MAX) {
    return {Reason::kKvLens, r, end - begin, INT32_MAX / table.page_size};
  }
  return {};
}

FIW_HOST_DEVICE inline LiveFault check_page(const LiveTable& table, std::int32_t r, std::int32_t entry) {
  const std::int32_t page = table.indices[entry];
  if (page >= 0 && page < table.num_pages) return {};
  return {Reason::kPageIndex, r, page, static_cast<std::int32_t>(table.num_pages - 1)};
}

}  // namespace fiw
