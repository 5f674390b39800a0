// Two passes: measure the columns, then print. Cells are ASCII, so bytes are columns.
#include "table.h"

#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace fiw::cli {

void Table::add(std::vector<std::string> cells) {
  if (cells.size() != columns_.size()) throw std::logic_error("table: a row must have one cell for every column");
  rows_.push_back(std::move(cells));
}

void Table::print(std::ostream& out) const {
  std::vector<std::size_t> widths;
  bool titled = false;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t width = columns_[c].title.size();
    titled = titled || width > 0;
    for (const auto& row : rows_) width = std::max(width, row[c].size());
    widths.push_back(width);
  }
  const auto print_row = [&](const auto& cell) {
    std::string line;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      if (c > 0) line += "  ";
      line += columns_[c].align == Align::kLeft ? fmt::format("{:<{}}", cell(c), widths[c])
                                                : fmt::format("{:>{}}", cell(c), widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << '\n';
  };
  if (titled) print_row([&](std::size_t c) { return columns_[c].title; });
  for (const auto& row : rows_) print_row([&](std::size_t c) { return row[c]; });
}

void print_json(const nlohmann::json& results) {
  std::cout << results.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
}

}  // namespace fiw::cli
