"""Faults of threads that should go together: barriers, simdgroup operations, other threadgroups."""

from __future__ import annotations

import numpy as np
from faulty_kernels import BARRIER, DEVICE_BARRIER, FENCE, Case

CASES = {
    "some threads skip the barrier": Case(
        "divergent-barrier",
        None,
        """
        uint i = thread_index_in_threadgroup;
        if (PLANT) {
            threadgroup_barrier(mem_flags::mem_threadgroup); // HERE
        }
        y[i] = x[i];
        """,
        "i < 64",
        "i < 40",
    ),
    "two barriers at once": Case(
        "divergent-barrier",
        None,
        """
        uint i = thread_index_in_threadgroup;
        if (PLANT) {
            threadgroup_barrier(mem_flags::mem_threadgroup); // THERE
        } else {
            threadgroup_barrier(mem_flags::mem_threadgroup); // HERE
        }
        y[i] = x[i];
        """,
        "i < 64",
        "i < 32",
        orders=("forward",),
    ),
    "a thread returns before the barrier": Case(
        "divergent-barrier",
        None,
        """
        uint i = thread_index_in_threadgroup;
        y[i] = 0;
        if (PLANT) return;
        threadgroup_barrier(mem_flags::mem_threadgroup); // HERE
        y[i] = x[i];
        """,
        "i > 63",
        "i > 62",
    ),
    "partial sums without release and acquire": Case(
        "cross-threadgroup",
        "y",
        f"""
        threadgroup bool last;
        uint t = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x, n = threadgroups_per_grid.x;
        device float* part = y + 64;
        part[g * 32 + t] = x[g * 32 + t]; // THERE
        PLANT
        {DEVICE_BARRIER}
        if (t == 0)
            last = atomic_fetch_add_explicit((device atomic_uint*)y, 1u, memory_order_relaxed) == n - 1;
        {BARRIER}
        if (last) {{
            PLANT
            float s = 0;
            for (uint i = 0; i < n; i++)
                s += part[i * 32 + t]; // HERE
            y[1 + t] = s;
        }}
        """,
        FENCE,
        "",
        grid=(128, 1, 1),
        threadgroup=(32, 1, 1),
        inputs={"x": np.arange(128, dtype=np.float32)},
        outputs=64 + 128,
        init_value=0,
    ),
    "release without acquire": Case(
        "cross-threadgroup",
        "y",
        f"""
        uint t = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
        device atomic_uint* flag = (device atomic_uint*)y;
        if (g == 0) {{
            y[32 + t] = x[t]; // THERE
            {FENCE}
            atomic_fetch_add_explicit(flag, 1u, memory_order_relaxed);
        }} else if (atomic_load_explicit(flag, memory_order_relaxed) == 32) {{
            PLANT
            y[64 + t] = y[32 + t]; // HERE
        }}
        """,
        FENCE,
        "",
        threadgroup=(32, 1, 1),
        outputs=96,
        init_value=0,
        orders=("forward",),
    ),
    "acquire without release": Case(
        "cross-threadgroup",
        "y",
        f"""
        uint t = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
        device atomic_uint* flag = (device atomic_uint*)y;
        if (g == 0) {{
            y[32 + t] = x[t]; // THERE
            PLANT
            atomic_fetch_add_explicit(flag, 1u, memory_order_relaxed);
        }} else if (atomic_load_explicit(flag, memory_order_relaxed) == 32) {{
            {FENCE}
            y[64 + t] = y[32 + t]; // HERE
        }}
        """,
        FENCE,
        "threadgroup_barrier(mem_flags::mem_device);",
        threadgroup=(32, 1, 1),
        outputs=96,
        init_value=0,
        orders=("forward",),
    ),
    "two threadgroups write one element": Case(
        "cross-threadgroup",
        "y",
        """
        uint i = thread_position_in_grid.x;
        y[PLANT] = x[i]; // HERE
        """,
        "i",
        "i % 32",
        threadgroup=(32, 1, 1),
    ),
    "a simdgroup operation for some lanes only": Case(
        "divergent-simdgroup",
        None,
        f"""
        uint i = thread_index_in_threadgroup;
        float s = x[i];
        if (PLANT)
            s = simd_sum(s); // HERE
        {BARRIER}
        y[i] = s;
        """,
        "i < 32",
        "i < 16",
        orders=("forward",),
    ),
    "two simdgroup operations at once": Case(
        "divergent-simdgroup",
        None,
        """
        uint i = thread_index_in_threadgroup;
        float s;
        if (PLANT)
            s = simd_max(x[i]); // THERE
        else
            s = simd_min(x[i]); // HERE
        y[i] = s;
        """,
        "i < 32",
        "i < 40",
        orders=("forward",),
    ),
    "a matrix operation in a partial simdgroup": Case(
        "divergent-simdgroup",
        None,
        """
        uint i = thread_index_in_threadgroup;
        if (i < PLANT) {
            simdgroup_float8x8 m;
            simdgroup_load(m, x); // HERE
            y[i] = m.thread_elements()[0];
        }
        """,
        "32",
        "64",
        grid=(48, 1, 1),
    ),
    "a shuffle from a lane that has returned": Case(
        "divergent-simdgroup",
        None,
        """
        uint i = thread_index_in_threadgroup;
        if (i >= 20) return;
        y[i] = simd_shuffle(x[i], PLANT); // HERE
        """,
        "19",
        "20",
        grid=(32, 1, 1),
    ),
    "simdgroup_load with a pointer for each lane": Case(
        "non-uniform",
        None,
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x + PLANT); // HERE
        y[thread_index_in_simdgroup] = m.thread_elements()[0];
        """,
        "0",
        "thread_index_in_simdgroup",
        grid=(32, 1, 1),
        inputs={"x": np.zeros(128, np.float32)},
    ),
    "waiting for another threadgroup": Case(
        "endless",
        None,
        """
        device atomic_uint* flag = (device atomic_uint*)y;
        if (threadgroup_position_in_grid.x == 0)
            while (atomic_load_explicit(flag, memory_order_relaxed) == PLANT) {} // HERE
        else
            atomic_store_explicit(flag, 1u, memory_order_relaxed);
        """,
        "7",
        "0",
        threadgroup=(32, 1, 1),
        init_value=0,
        orders=("forward",),
    ),
}
