// Which pages of the KV cache belong to which request, validated once when built.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace fiw {

namespace detail {
struct PageTableData;
}

/// The padded form that other engines hold: row i lists request i's pages, then padding.
struct BlockTable {
  std::int32_t page_size = 0;
  std::int32_t max_pages = 0;         ///< columns
  std::vector<std::int32_t> blocks;   ///< [batch, max_pages], row-major; entries past a request's pages are ignored
  std::vector<std::int32_t> kv_lens;  ///< [batch], tokens; row i uses ceil(kv_lens[i] / page_size) entries
};

/// A page table that lies in the workspace's memory, as an engine's kernels write it; on the CPU that is host memory.
/// FlashInferWorkspace::read_table makes a PageTable of it.
struct DevicePageTable {
  std::int32_t page_size = 1;
  std::int64_t num_pages = 0;                     ///< page ids are below it
  std::span<const std::int32_t> indptr{};         ///< [batch + 1]
  std::span<const std::int32_t> indices{};        ///< [indptr[batch]], or more: what follows is ignored
  std::span<const std::int32_t> last_page_len{};  ///< [batch]
  /// The caller's word for the contents: whoever changes them gives them a version that these arrays, of these lengths,
  /// have not had before. 0: no word is given, and the contents themselves are compared.
  std::uint64_t version = 0;
};

/// CSR over pages: request i owns pages indices[indptr[i] .. indptr[i+1]) and its last page holds last_page_len[i]
/// tokens.
///
/// A page table is a small handle to immutable, shared contents: copying is cheap and thread-safe, and a plan that
/// keeps a copy can prove "unchanged" by identity because it keeps those very contents alive. `advance` gives this
/// handle new contents and leaves other copies alone. Pages may be shared by several requests (prefix reuse).
class PageTable {
 public:
  /// An empty batch (page size 1), legal everywhere.
  PageTable();
  /// Copies share contents. There is no move: a table that was passed on stays a table.
  PageTable(const PageTable&) = default;
  PageTable& operator=(const PageTable&) = default;
  ~PageTable() = default;

  /// From host CSR arrays, copied.
  ///
  /// `indptr` [batch + 1] starts at 0 and does not decrease; `indices` [indptr[batch]] are page ids in [0, num_pages);
  /// `last_page_len` [batch] is in 1..page_size for a request with pages and ignored for one without (its length is 0).
  /// `kv_lens` [batch], if given, must equal the lengths that the CSR form implies: a surplus page is otherwise
  /// invisible. Throws fiw::Error naming the request, the value and the limit.
  static PageTable from_csr(std::int32_t page_size, std::int64_t num_pages, std::span<const std::int32_t> indptr,
                            std::span<const std::int32_t> indices, std::span<const std::int32_t> last_page_len,
                            std::span<const std::int32_t> kv_lens = {});

  /// From one list of pages a request and the lengths in tokens. Request i uses the first ceil(kv_lens[i] / page_size)
  /// of its pages; more are ignored (pages reserved ahead), fewer are an error.
  static PageTable from_pages(std::int32_t page_size, std::int64_t num_pages,
                              std::span<const std::vector<std::int32_t>> pages, std::span<const std::int32_t> kv_lens);

  /// From a padded block table of batch * max_pages entries; those past a request's pages are not read.
  static PageTable from_block_table(const BlockTable& table, std::int64_t num_pages);

  /// The padded form, `max_pages` columns (0: as many as the longest request needs), padded with `pad`.
  BlockTable to_block_table(std::int32_t max_pages = 0, std::int32_t pad = -1) const;

  /// Every request grows by `tokens` (>= 0). `new_pages` holds the pages gained, in request order; it must hold exactly
  /// `pages_needed(tokens)` of them. This handle then shows the new table; copies made before keep the old one.
  void advance(std::int32_t tokens, std::span<const std::int32_t> new_pages = {});
  /// As above with a growth for each request, `tokens` [batch].
  void advance(std::span<const std::int32_t> tokens, std::span<const std::int32_t> new_pages = {});
  /// Pages that `advance(tokens)` would take.
  std::int64_t pages_needed(std::int32_t tokens) const noexcept;

  std::int32_t batch() const noexcept;
  std::int32_t page_size() const noexcept;
  /// The pool size that indices were checked against.
  std::int64_t num_pages() const noexcept;
  std::span<const std::int32_t> indptr() const noexcept;         ///< [batch + 1]
  std::span<const std::int32_t> indices() const noexcept;        ///< [indptr[batch]]
  std::span<const std::int32_t> last_page_len() const noexcept;  ///< [batch]; 0 for a request with no page
  std::span<const std::int32_t> page_counts() const noexcept;    ///< [batch], pages a request
  std::span<const std::int32_t> kv_lens() const noexcept;        ///< [batch], tokens a request
  std::int64_t total_kv() const noexcept;                        ///< sum of kv_lens
  std::int32_t max_kv_len() const noexcept;
  std::int32_t max_page_index() const noexcept;     ///< -1 when no page is used
  std::uint64_t page_counts_hash() const noexcept;  ///< of page_counts(), computed once

  /// Equal contents (pages, lengths, page size). Compared in full unless both handles share the same contents.
  friend bool operator==(const PageTable& a, const PageTable& b) noexcept;

 private:
  explicit PageTable(std::shared_ptr<const detail::PageTableData> data) : data_(std::move(data)) {}
  std::shared_ptr<const detail::PageTableData> data_;
};

}  // namespace fiw
