// See table_cache.h.
#include "cuda/table_cache.h"

#include <algorithm>
#include <bit>

#include "core/allocate.h"

namespace fiw::cuda {
namespace {

constexpr std::size_t kEntries = 8;
constexpr std::size_t kLeastBytes = 4096;
constexpr std::int32_t kNoKey = -1;

}  // namespace

bool TableCache::Entry::matches(const TableKey& key) const noexcept {
  if (memory == nullptr || paged != (key.table != nullptr) || uniform_qo_len != key.uniform_qo_len) return false;
  if (!std::ranges::equal(qo_indptr, key.qo_indptr)) return false;
  return paged ? table == *key.table : std::ranges::equal(kv_indptr, key.kv_indptr);
}

TableCache::~TableCache() {
  for (const Entry& entry : entries_) {
    if (entry.memory != nullptr) backend_.release(entry.memory, entry.bytes, nullptr);
  }
}

const DeviceTable& TableCache::find(const TableKey& key, Stream stream) {
  ++clock_;
  for (Entry& entry : entries_) {
    if (!entry.matches(key)) continue;
    entry.last_used = clock_;
    return entry.view;
  }
  Entry& entry =
      entries_.size() < kEntries ? entries_.emplace_back() : *std::ranges::min_element(entries_, {}, &Entry::last_used);
  fill(entry, key, stream);
  return entry.view;
}

void TableCache::fill(Entry& entry, const TableKey& key, Stream stream) {
  const bool paged = key.table != nullptr;
  const std::span<const std::int32_t> indptr = paged ? key.table->indptr() : key.kv_indptr;
  const std::size_t batch = indptr.size() - 1;
  const std::size_t pages = paged ? key.table->indices().size() : 0;
  const std::size_t words = 2 * (batch + 1) + (paged ? 3 * batch + 1 + pages : 0);
  if (words * sizeof(std::int32_t) > entry.bytes) {
    const std::size_t bytes = std::bit_ceil(std::max(words * sizeof(std::int32_t), kLeastBytes));
    std::byte* const fresh = allocate_or_throw(backend_, bytes, "page table", stream);
    if (entry.memory != nullptr) backend_.release(entry.memory, entry.bytes, stream);
    entry.memory = fresh;
    entry.bytes = bytes;
  }
  // From here to the end the entry matches nothing, should something fail.
  entry.uniform_qo_len = kNoKey;
  entry.last_used = 0;
  entry.view = {};

  const std::span<std::byte> staged = backend_.stage(entry.memory, words * sizeof(std::int32_t));
  auto* const host = reinterpret_cast<std::int32_t*>(staged.data());
  const auto* const device = reinterpret_cast<const std::int32_t*>(entry.memory);
  std::size_t at = 0;
  const auto place = [&](std::span<const std::int32_t> values) {
    std::ranges::copy(values, host + at);
    const std::size_t offset = at;
    at += values.size();
    return device + offset;
  };
  const std::int32_t* const qo_indptr = host;
  for (std::size_t r = 0; r <= batch; ++r) {
    host[at++] = key.qo_indptr.empty() ? static_cast<std::int32_t>(r) * key.uniform_qo_len : key.qo_indptr[r];
  }
  entry.view.qo_indptr = device;
  entry.view.indptr = place(indptr);
  if (paged) {
    entry.view.last_page_len = place(key.table->last_page_len());
    entry.view.kv_lens = place(key.table->kv_lens());
    entry.view.kv_offsets = device + at;
    // Wraps for caches beyond 2^31 tokens, whose calls read no offsets.
    std::uint32_t offset = 0;
    for (std::size_t r = 0; r <= batch; ++r) {
      host[at++] = static_cast<std::int32_t>(offset);
      if (r < batch) offset += static_cast<std::uint32_t>(key.table->kv_lens()[r]);
    }
    entry.view.indices = place(key.table->indices());
  }
  for (std::size_t r = 0; r < batch; ++r) {
    const std::int32_t kv_len = paged ? key.table->kv_lens()[r] : key.kv_indptr[r + 1] - key.kv_indptr[r];
    const std::int32_t qo_len = qo_indptr[r + 1] - qo_indptr[r];
    entry.view.rows_before_start |= kv_len > 0 && qo_len > kv_len;
  }
  backend_.upload(entry.memory, staged, stream);

  entry.paged = paged;
  entry.table = paged ? *key.table : PageTable();
  entry.kv_indptr.assign(key.kv_indptr.begin(), key.kv_indptr.end());
  entry.qo_indptr.assign(key.qo_indptr.begin(), key.qo_indptr.end());
  entry.uniform_qo_len = key.uniform_qo_len;
  entry.last_used = clock_;
}

}  // namespace fiw::cuda
