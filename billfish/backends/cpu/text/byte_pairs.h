// Byte-pair encoding of a word, with the tokens that the library `tokenizers` finds. Its tables take a fourth of the time to make.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "text/string_table.h"

namespace billfish {

class BytePairs {
 public:
  // pieces: of tokens, where texts may have them. merges: "left right", the best first. ignore_merges: a word that is a piece is taken whole. Throws
  // std::invalid_argument for a merge whose parts or whole are no pieces.
  BytePairs(std::vector<std::optional<std::string>> pieces, const std::vector<std::string>& merges, bool ignore_merges)
      : pieces_(std::move(pieces)), ignore_merges_(ignore_merges) {
    merges_.reserve(merges.size());
    std::string whole;
    for (size_t rank = 0; rank < merges.size(); rank++) {
      const std::string_view merge = merges[rank];
      const size_t cut = merge.find(' ', 1);  // a piece may begin with a space
      if (cut == std::string_view::npos) throw std::invalid_argument("'" + merges[rank] + "' has no two parts");
      const std::string_view left = merge.substr(0, cut), right = merge.substr(cut + 1);
      whole.assign(left).append(right);
      const int32_t tokens[3] = {pieces_.find(left), pieces_.find(right), pieces_.find(whole)};
      for (const int32_t token : tokens)
        if (token < 0) throw std::invalid_argument("'" + merges[rank] + "' merges what is no token");
      merges_.push_back({pair_of(tokens[0], tokens[1]), int32_t(rank), tokens[2]});
    }
    std::sort(merges_.begin(), merges_.end(), [](const Merge& a, const Merge& b) { return std::tie(a.pair, a.rank) < std::tie(b.pair, b.rank); });
  }
  BytePairs(const BytePairs&) = delete;

  // The token of a piece, or -1.
  int32_t token(const std::string& piece) const { return pieces_.find(piece); }

  // Left and right parts, the best merge first.
  std::vector<std::pair<std::string, std::string>> merges() const {
    std::vector<Merge> ranked = merges_;
    std::sort(ranked.begin(), ranked.end(), [](const Merge& a, const Merge& b) { return a.rank < b.rank; });
    std::vector<std::pair<std::string, std::string>> all;
    for (const Merge& merge : ranked) all.emplace_back(pieces_[int32_t(merge.pair >> 32)], pieces_[int32_t(merge.pair & 0xffffffff)]);
    return all;
  }

  // The tokens of a word. Characters that are no pieces are left out.
  std::vector<int32_t> encode(const std::string& word) const {
    if (const int32_t whole = ignore_merges_ ? pieces_.find(word) : -1; whole >= 0) return {whole};
    std::vector<Part> parts;
    for (size_t i = 0, end; i < word.size(); i = end) {
      for (end = i + 1; end < word.size() && (uint8_t(word[end]) & 0xc0) == 0x80;) end++;
      const int32_t token = pieces_.find(std::string_view(word).substr(i, end - i));
      if (token >= 0) parts.push_back({token, int(parts.size()) - 1, int(parts.size()) + 1});
    }
    merge_all(parts);
    std::vector<int32_t> tokens;
    for (const Part& part : parts)
      if (part.token >= 0) tokens.push_back(part.token);
    return tokens;
  }

 private:
  // A run of characters; the part before it and the part behind it. Its token is -1 when it is merged with the part before it.
  struct Part {
    int32_t token;
    int before, behind;
  };
  struct Merge {
    uint64_t pair;
    int32_t rank, token;
  };
  using Offer = std::tuple<int32_t, int, int32_t>;  // rank, place of the left part, token of both

  static uint64_t pair_of(int32_t left, int32_t right) { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }

  // Of equal pairs the last counts.
  const Merge* find(uint64_t pair) const {
    const auto behind = std::upper_bound(merges_.begin(), merges_.end(), pair, [](uint64_t wanted, const Merge& merge) { return wanted < merge.pair; });
    return behind != merges_.begin() && behind[-1].pair == pair ? &behind[-1] : nullptr;
  }

  // The merge of best rank goes first, and of equal ones the leftmost.
  void merge_all(std::vector<Part>& parts) const {
    const int count = int(parts.size());
    std::priority_queue<Offer, std::vector<Offer>, std::greater<>> next;
    const auto merge_at = [&](int place) {
      const Part& left = parts[size_t(place)];
      return left.behind < count ? find(pair_of(left.token, parts[size_t(left.behind)].token)) : nullptr;
    };
    const auto offer = [&](int place) {
      if (const Merge* merge = merge_at(place)) next.emplace(merge->rank, place, merge->token);
    };
    for (int i = 0; i < count; i++) offer(i);
    while (!next.empty()) {
      const auto [rank, place, token] = next.top();
      next.pop();
      if (const Merge* merge = merge_at(place); !merge || merge->token != token) continue;  // merged otherwise meanwhile
      Part& left = parts[size_t(place)];
      Part& right = parts[size_t(left.behind)];
      left.token = token, left.behind = right.behind, right.token = -1;
      if (left.behind < count) parts[size_t(left.behind)].before = place, offer(place);
      if (left.before >= 0) offer(left.before);
    }
  }

  const StringTable pieces_;
  const bool ignore_merges_;
  std::vector<Merge> merges_;  // by pair
};

}  // namespace billfish
