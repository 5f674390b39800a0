// A page table in the workspace's memory that a test rewrites in place: same addresses, other contents.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fiw/page_table.h"
#include "support/device_buffer.h"

namespace fiw::test {

struct LiveArrays {
  LiveArrays(int device, std::int32_t max_batch, std::int32_t max_pages)
      : indptr(device, static_cast<std::size_t>(max_batch) + 1),
        indices(device, static_cast<std::size_t>(max_pages)),
        last_page_len(device, static_cast<std::size_t>(max_batch)) {}

  void put(const PageTable& table) {
    const auto batch = static_cast<std::size_t>(table.batch());
    std::ranges::copy(table.indptr(), indptr.host().begin());
    std::fill(indptr.host().begin() + static_cast<std::ptrdiff_t>(batch), indptr.host().end(), table.indptr().back());
    std::ranges::copy(table.indices(), indices.host().begin());
    std::ranges::fill(last_page_len.host(), 0);
    std::ranges::copy(table.last_page_len(), last_page_len.host().begin());
    upload();
  }
  void upload() {
    indptr.upload();
    indices.upload();
    last_page_len.upload();
  }
  DevicePageTable view(std::int32_t page_size, std::int64_t num_pages) const {
    return {.page_size = page_size,
            .num_pages = num_pages,
            .indptr = {indptr.device(), indptr.host().size()},
            .indices = {indices.device(), indices.host().size()},
            .last_page_len = {last_page_len.device(), last_page_len.host().size()}};
  }

  Mirror<std::int32_t> indptr;
  Mirror<std::int32_t> indices;
  Mirror<std::int32_t> last_page_len;
};

}  // namespace fiw::test
