// Device copies of page tables and row offsets, so that the layers of a step share one upload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/backend.h"
#include "fiw/page_table.h"

namespace fiw::cuda {

/// What a call reads of its requests on the device, in one copy.
struct DeviceTable {
  const std::int32_t* indptr = nullptr;         ///< [batch + 1]: pages, or tokens of ragged K/V
  const std::int32_t* indices = nullptr;        ///< [pages]; null for ragged
  const std::int32_t* last_page_len = nullptr;  ///< [batch]; null for ragged
  const std::int32_t* kv_lens = nullptr;        ///< [batch]; null for ragged
  const std::int32_t* kv_offsets = nullptr;     ///< [batch + 1], tokens before each request; null for ragged
  const std::int32_t* qo_indptr = nullptr;      ///< [batch + 1]
  /// A request has more query rows than keys, and keys: its first rows lie before position 0.
  bool rows_before_start = false;
};

/// The host side of a table; the spans are read during find() only.
struct TableKey {
  const PageTable* table = nullptr;           ///< null for ragged
  std::span<const std::int32_t> kv_indptr{};  ///< ragged only
  std::span<const std::int32_t> qo_indptr{};  ///< empty: uniform
  std::int32_t uniform_qo_len = 0;
};

/// Least recently used; contents decide equality.
class TableCache {
 public:
  /// Its memory comes from `backend`, which must outlive it.
  explicit TableCache(Backend& backend) : backend_(backend) {}
  TableCache(const TableCache&) = delete;
  TableCache& operator=(const TableCache&) = delete;
  ~TableCache();

  /// The device copy of `key`, uploaded on `stream` when it is not there yet.
  const DeviceTable& find(const TableKey& key, Stream stream);

 private:
  struct Entry {
    bool paged = true;
    PageTable table;
    std::vector<std::int32_t> kv_indptr;
    std::vector<std::int32_t> qo_indptr;
    std::int32_t uniform_qo_len = 0;
    std::byte* memory = nullptr;
    std::size_t bytes = 0;
    std::uint64_t last_used = 0;
    DeviceTable view;

    bool matches(const TableKey& key) const noexcept;
  };
  void fill(Entry& entry, const TableKey& key, Stream stream);

  Backend& backend_;
  std::vector<Entry> entries_;
  std::uint64_t clock_ = 0;
};

}  // namespace fiw::cuda
