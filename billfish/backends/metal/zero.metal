// marlin_zero_reduction: a float buffer of zeros, a thread for each number.
if (thread_position_in_grid.x < uint(COUNT)) y[thread_position_in_grid.x] = 0.0f;
