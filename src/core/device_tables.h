// Page tables that were brought from device memory, so that an unchanged one keeps its handle, and with it everything
// that is found by it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "fiw/page_table.h"

namespace fiw {

class DeviceTables {
 public:
  explicit DeviceTables(std::int32_t max_entries) : max_entries_(static_cast<std::size_t>(max_entries)) {}

  /// See FlashInferWorkspace::read_table.
  PageTable read(Backend& backend, const DevicePageTable& table, Stream stream);
  /// Forgets all tables; counters stay.
  void clear() noexcept { entries_.clear(); }

  std::uint64_t known() const noexcept { return known_; }
  std::uint64_t copied() const noexcept { return copied_; }

 private:
  struct Entry {
    DevicePageTable source;  ///< where the contents were read last
    PageTable table;
    std::uint64_t last_used = 0;
  };
  PageTable fetch(Backend& backend, const DevicePageTable& table, Stream stream);

  std::size_t max_entries_;
  std::vector<Entry> entries_;
  std::vector<std::int32_t> words_;  ///< of the table at hand
  std::uint64_t clock_ = 0;
  std::uint64_t known_ = 0;
  std::uint64_t copied_ = 0;
};

}  // namespace fiw
