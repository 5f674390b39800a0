// Building, validating and advancing page tables.
#include "fiw/page_table.h"

#include <algorithm>
#include <limits>

#include "core/fail.h"
#include "core/hash.h"
#include "core/support.h"

namespace fiw {

namespace detail {

/// The shared contents. Written only while a single handle owns them.
struct PageTableData {
  std::int32_t page_size = 1;
  std::int64_t num_pages = 0;
  std::vector<std::int32_t> indptr{0};
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> last_page_len;
  std::vector<std::int32_t> page_counts;
  std::vector<std::int32_t> kv_lens;
  std::int64_t total_kv = 0;
  std::int32_t max_kv_len = 0;
  std::int32_t max_page_index = -1;
  std::uint64_t page_counts_hash = 0;
};

}  // namespace detail

namespace {

using detail::PageTableData;

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

void check_index(std::int64_t request, std::int32_t page, std::int64_t num_pages) {
  if (page < 0 || page >= num_pages) {
    fail_at(request, Reason::kPageIndex, "request {} uses page {}, expected 0 <= page < num_pages = {}", request, page,
            num_pages);
  }
}

std::int32_t checked_kv_len(std::int64_t request, std::int64_t kv_len) {
  if (kv_len > kMaxInt32) {
    fail_at(request, Reason::kTableSize, "request {} has {} tokens, more than int32 holds", request, kv_len);
  }
  return static_cast<std::int32_t>(kv_len);
}

/// Fills the derived fields but max_page_index from indptr and last_page_len, which are valid.
void derive(PageTableData& data) {
  const std::size_t batch = data.last_page_len.size();
  data.page_counts.resize(batch);
  data.kv_lens.resize(batch);
  data.total_kv = 0;
  data.max_kv_len = 0;
  for (std::size_t r = 0; r < batch; ++r) {
    const std::int32_t pages = data.indptr[r + 1] - data.indptr[r];
    if (pages == 0) data.last_page_len[r] = 0;
    const std::int64_t kv_len =
        pages == 0 ? 0 : static_cast<std::int64_t>(pages - 1) * data.page_size + data.last_page_len[r];
    data.page_counts[r] = pages;
    data.kv_lens[r] = checked_kv_len(static_cast<std::int64_t>(r), kv_len);
    data.total_kv += kv_len;
    data.max_kv_len = std::max(data.max_kv_len, data.kv_lens[r]);
  }
  data.page_counts_hash = hash_ints(data.page_counts);
}

std::int32_t largest_page(std::span<const std::int32_t> pages) {
  std::int32_t largest = -1;
  for (const std::int32_t page : pages) largest = std::max(largest, page);
  return largest;
}

}  // namespace

PageTable::PageTable() {
  // All empty tables share one immutable object, so that making a handle allocates nothing.
  static const std::shared_ptr<const PageTableData> empty = [] {
    auto data = std::make_shared<PageTableData>();
    derive(*data);
    return data;
  }();
  data_ = empty;
}

PageTable PageTable::from_csr(std::int32_t page_size, std::int64_t num_pages, std::span<const std::int32_t> indptr,
                              std::span<const std::int32_t> indices, std::span<const std::int32_t> last_page_len,
                              std::span<const std::int32_t> kv_lens) {
  support::check_pool(page_size, num_pages);
  const std::size_t batch = last_page_len.size();
  if (indptr.size() != batch + 1) {
    fail(Reason::kIndptrLength, "indptr has {} entries, expected batch + 1 = {} (last_page_len has {})", indptr.size(),
         batch + 1, batch);
  }
  if (indptr[0] != 0) fail(Reason::kIndptrStart, "indptr[0] is {}, expected 0", indptr[0]);
  for (std::size_t r = 0; r < batch; ++r) {
    if (indptr[r + 1] < indptr[r]) {
      fail_at(r, Reason::kIndptrDecreasing, "request {}: indptr[{}] is {}, below indptr[{}] = {}", r, r + 1,
              indptr[r + 1], r, indptr[r]);
    }
  }
  if (static_cast<std::int64_t>(indices.size()) != indptr[batch]) {
    fail(Reason::kIndicesLength, "indices has {} entries, expected indptr[{}] = {}", indices.size(), batch,
         indptr[batch]);
  }
  if (!kv_lens.empty() && kv_lens.size() != batch) {
    fail(Reason::kBatch, "kv_lens has {} entries, expected batch = {}", kv_lens.size(), batch);
  }
  for (std::size_t r = 0; r < batch; ++r) {
    for (std::int32_t i = indptr[r]; i < indptr[r + 1]; ++i) {
      check_index(static_cast<std::int64_t>(r), indices[static_cast<std::size_t>(i)], num_pages);
    }
    const bool has_pages = indptr[r + 1] > indptr[r];
    if (has_pages && (last_page_len[r] < 1 || last_page_len[r] > page_size)) {
      fail_at(r, Reason::kLastPageLen, "request {}: last_page_len is {}, expected 1..page_size = {}", r,
              last_page_len[r], page_size);
    }
    if (!kv_lens.empty()) {
      const std::int64_t kv_len =
          has_pages ? static_cast<std::int64_t>(indptr[r + 1] - indptr[r] - 1) * page_size + last_page_len[r] : 0;
      if (kv_len != kv_lens[r]) {
        fail_at(r, Reason::kKvLens, "request {}: its pages and last_page_len hold {} tokens, {} against {} in kv_lens",
                r, kv_len, kv_len, kv_lens[r]);
      }
    }
  }

  auto data = std::make_shared<PageTableData>();
  data->page_size = page_size;
  data->num_pages = num_pages;
  data->indptr.assign(indptr.begin(), indptr.end());
  data->indices.assign(indices.begin(), indices.end());
  data->last_page_len.assign(last_page_len.begin(), last_page_len.end());
  data->max_page_index = largest_page(data->indices);
  derive(*data);
  return PageTable(std::move(data));
}

namespace {

/// Shared by the two builders from lengths: `pages_of(r)` gives at least as many page ids as request r needs.
template <class PagesOf>
std::shared_ptr<PageTableData> from_lengths(std::int32_t page_size, std::int64_t num_pages,
                                            std::span<const std::int32_t> kv_lens, const PagesOf& pages_of) {
  support::check_pool(page_size, num_pages);
  auto data = std::make_shared<PageTableData>();
  data->page_size = page_size;
  data->num_pages = num_pages;
  for (std::size_t r = 0; r < kv_lens.size(); ++r) {
    if (kv_lens[r] < 0) fail_at(r, Reason::kKvLens, "kv_lens[{}] is {}, expected at least 0", r, kv_lens[r]);
    const std::int64_t needed = ceil_div(kv_lens[r], page_size);
    const std::span<const std::int32_t> pages = pages_of(r);
    if (static_cast<std::int64_t>(pages.size()) < needed) {
      fail_at(r, Reason::kKvLens, "request {} has {} pages, its {} tokens need {} of {} tokens each", r, pages.size(),
              kv_lens[r], needed, page_size);
    }
    for (const std::int32_t page : pages.first(static_cast<std::size_t>(needed))) {
      check_index(static_cast<std::int64_t>(r), page, num_pages);
      data->indices.push_back(page);
    }
    if (static_cast<std::int64_t>(data->indices.size()) > kMaxInt32) {
      fail_at(r, Reason::kTableSize, "requests 0..{} use {} pages, more than int32 holds", r, data->indices.size());
    }
    data->indptr.push_back(static_cast<std::int32_t>(data->indices.size()));
    data->last_page_len.push_back(needed == 0 ? 0 : static_cast<std::int32_t>(kv_lens[r] - (needed - 1) * page_size));
  }
  data->max_page_index = largest_page(data->indices);
  derive(*data);
  return data;
}

}  // namespace

PageTable PageTable::from_pages(std::int32_t page_size, std::int64_t num_pages,
                                std::span<const std::vector<std::int32_t>> pages,
                                std::span<const std::int32_t> kv_lens) {
  if (pages.size() != kv_lens.size()) {
    fail(Reason::kBatch, "pages lists {} requests, kv_lens has {}", pages.size(), kv_lens.size());
  }
  return PageTable(from_lengths(page_size, num_pages, kv_lens,
                                [&](std::size_t r) -> std::span<const std::int32_t> { return pages[r]; }));
}

PageTable PageTable::from_block_table(const BlockTable& table, std::int64_t num_pages) {
  if (table.max_pages < 0) fail(Reason::kTableSize, "max_pages is {}, expected at least 0", table.max_pages);
  const auto columns = static_cast<std::size_t>(table.max_pages);
  if (table.blocks.size() != table.kv_lens.size() * columns) {
    fail(Reason::kIndicesLength, "blocks has {} entries, expected batch * max_pages = {} * {}", table.blocks.size(),
         table.kv_lens.size(), table.max_pages);
  }
  return PageTable(from_lengths(table.page_size, num_pages, table.kv_lens, [&](std::size_t r) {
    return std::span<const std::int32_t>(table.blocks).subspan(r * columns, columns);
  }));
}

BlockTable PageTable::to_block_table(std::int32_t max_pages, std::int32_t pad) const {
  const std::span<const std::int32_t> counts = page_counts();
  if (max_pages < 0) fail(Reason::kTableSize, "max_pages is {}, expected at least 0", max_pages);
  if (max_pages == 0 && !counts.empty()) max_pages = *std::ranges::max_element(counts);
  BlockTable table{.page_size = page_size(), .max_pages = max_pages, .blocks = {}, .kv_lens = {}};
  table.kv_lens.assign(kv_lens().begin(), kv_lens().end());
  const auto columns = static_cast<std::size_t>(max_pages);
  table.blocks.assign(counts.size() * columns, pad);
  for (std::size_t r = 0; r < counts.size(); ++r) {
    if (counts[r] > max_pages) {
      fail_at(r, Reason::kTableSize, "request {} has {} pages, max_pages is {}", r, counts[r], max_pages);
    }
    std::copy_n(indices().begin() + indptr()[r], counts[r],
                table.blocks.begin() + static_cast<std::ptrdiff_t>(r * columns));
  }
  return table;
}

namespace {

/// The table after each request r has grown by `tokens_of(r)`.
template <class TokensOf>
std::shared_ptr<PageTableData> grown(const PageTableData& old, const TokensOf& tokens_of,
                                     std::span<const std::int32_t> new_pages) {
  auto data = std::make_shared<PageTableData>();
  data->page_size = old.page_size;
  data->num_pages = old.num_pages;
  const std::size_t batch = old.last_page_len.size();
  data->indptr.reserve(batch + 1);
  data->indices.reserve(old.indices.size() + new_pages.size());
  data->last_page_len.reserve(batch);
  std::size_t taken = 0;
  std::int32_t copied = 0;  // old pages, which are copied together where no request between them gains one
  const auto copy_to = [&](std::int32_t end) {
    data->indices.insert(data->indices.end(), old.indices.begin() + copied, old.indices.begin() + end);
    copied = end;
  };
  for (std::size_t r = 0; r < batch; ++r) {
    const std::int32_t tokens = tokens_of(r);
    if (tokens < 0) fail_at(r, Reason::kNewPages, "request {} grows by {} tokens, expected at least 0", r, tokens);
    const std::int32_t kv_len = checked_kv_len(static_cast<std::int64_t>(r), std::int64_t{old.kv_lens[r]} + tokens);
    const std::int64_t needed = ceil_div(kv_len, old.page_size);
    if (needed > old.page_counts[r]) copy_to(old.indptr[r + 1]);
    for (std::int64_t i = old.page_counts[r]; i < needed; ++i) {
      if (taken == new_pages.size()) {
        fail_at(r, Reason::kNewPages, "new_pages has {} entries, all used before request {} has its {} pages",
                new_pages.size(), r, needed);
      }
      check_index(static_cast<std::int64_t>(r), new_pages[taken], old.num_pages);
      data->indices.push_back(new_pages[taken++]);
    }
    const std::int64_t entries = std::int64_t{old.indptr[r + 1]} + static_cast<std::int64_t>(taken);
    if (entries > kMaxInt32) {
      fail_at(r, Reason::kTableSize, "requests 0..{} use {} pages, more than int32 holds", r, entries);
    }
    data->indptr.push_back(static_cast<std::int32_t>(entries));
    data->last_page_len.push_back(needed == 0 ? 0 : static_cast<std::int32_t>(kv_len - (needed - 1) * old.page_size));
  }
  copy_to(old.indptr.back());
  if (taken != new_pages.size()) {
    fail(Reason::kNewPages, "new_pages has {} entries, the requests need {}", new_pages.size(), taken);
  }
  data->max_page_index = std::max(old.max_page_index, largest_page(new_pages));
  derive(*data);
  return data;
}

}  // namespace

void PageTable::advance(std::int32_t tokens, std::span<const std::int32_t> new_pages) {
  data_ = grown(
      *data_, [&](std::size_t) { return tokens; }, new_pages);
}

void PageTable::advance(std::span<const std::int32_t> tokens, std::span<const std::int32_t> new_pages) {
  if (static_cast<std::int64_t>(tokens.size()) != batch()) {
    fail(Reason::kBatch, "tokens has {} entries, expected batch = {}", tokens.size(), batch());
  }
  data_ = grown(
      *data_, [&](std::size_t r) { return tokens[r]; }, new_pages);
}

std::int64_t PageTable::pages_needed(std::int32_t tokens) const noexcept {
  std::int64_t pages = 0;
  for (std::size_t r = 0; r < data_->kv_lens.size(); ++r) {
    pages += ceil_div(std::int64_t{data_->kv_lens[r]} + tokens, data_->page_size) - data_->page_counts[r];
  }
  return pages;
}

std::int32_t PageTable::batch() const noexcept { return static_cast<std::int32_t>(data_->last_page_len.size()); }
std::int32_t PageTable::page_size() const noexcept { return data_->page_size; }
std::int64_t PageTable::num_pages() const noexcept { return data_->num_pages; }
std::span<const std::int32_t> PageTable::indptr() const noexcept { return data_->indptr; }
std::span<const std::int32_t> PageTable::indices() const noexcept { return data_->indices; }
std::span<const std::int32_t> PageTable::last_page_len() const noexcept { return data_->last_page_len; }
std::span<const std::int32_t> PageTable::page_counts() const noexcept { return data_->page_counts; }
std::span<const std::int32_t> PageTable::kv_lens() const noexcept { return data_->kv_lens; }
std::int64_t PageTable::total_kv() const noexcept { return data_->total_kv; }
std::int32_t PageTable::max_kv_len() const noexcept { return data_->max_kv_len; }
std::int32_t PageTable::max_page_index() const noexcept { return data_->max_page_index; }
std::uint64_t PageTable::page_counts_hash() const noexcept { return data_->page_counts_hash; }

bool operator==(const PageTable& a, const PageTable& b) noexcept {
  // Both handles keep their contents alive and unchanged, so one shared object is proof of equality; an address alone
  // would not be.
  if (a.data_ == b.data_) return true;
  return a.data_->page_size == b.data_->page_size && a.data_->page_counts_hash == b.data_->page_counts_hash &&
         a.data_->kv_lens == b.data_->kv_lens && a.data_->indices == b.data_->indices;
}

}  // namespace fiw
