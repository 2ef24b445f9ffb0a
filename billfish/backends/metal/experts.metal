// Stacks of weights: the planes of one matrix behind those of the other, [E, numbers], and choices (a row of x, an expert it
// goes to).
//
// Tiles take choices that are sorted by expert. A tile has choices of several experts: it goes along K once for each of them.
namespace billfish {

// Some choices of one expert. `order` says which choice is where, and SHARE neighbouring choices have one row of x.
template <int SHARE>
struct SortedChoices {
  const device uint* order;
  int begin, end;

  METAL_FUNC bool has(int at) const thread { return at >= begin && at < end; }
  METAL_FUNC int source(int at) const thread { return order[at] / SHARE; }
  METAL_FUNC int target(int at) const thread { return order[at]; }
};

// How many choices each of so many tiles has: whole rows of 8x8 matrices.
METAL_FUNC int tile_choices(int choices, int tiles) { return ((choices + tiles - 1) / tiles + 7) / 8 * 8; }

// Where the run of the expert at `begin` ends, at most `last`. Experts are in ascending order.
METAL_FUNC int run_end(const device uint* experts, int begin, int last) {
  const uint expert = experts[begin];
  int low = begin + 1, high = last;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (experts[middle] == expert) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// What becomes of choices whose expert is none of the stack: nobody can report it from here.
constexpr constant uint NO_NUMBER = 0x7FC00000u;

}  // namespace billfish
