// marlin_zero_reduction: zeros in a buffer of partial sums, a thread for each. Ours need none, as every sum is written; it is
// for those who keep one buffer and add to it.
y[thread_position_in_grid.x] = 0.0f;
