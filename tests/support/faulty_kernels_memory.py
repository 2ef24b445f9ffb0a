"""Faults of one access or of two: races within a threadgroup, bounds, uninitialised memory."""

from __future__ import annotations

import numpy as np
from faulty_kernels import BARRIER, DEVICE_BARRIER, Case

CASES = {
    "missing barrier, read after write": Case(
        "race",
        "tile",
        f"""
        threadgroup float tile[64];
        uint i = thread_index_in_threadgroup;
        tile[i] = 0;
        {BARRIER}
        tile[i] = x[i]; // THERE
        PLANT
        y[i] = tile[63 - i]; // HERE
        """,
        BARRIER,
        "",
    ),
    "missing barrier, write after read": Case(
        "race",
        "tile",
        f"""
        threadgroup float tile[64];
        uint i = thread_index_in_threadgroup;
        float s = 0;
        for (int round = 0; round < 2; round++) {{
            tile[i] = x[i] + round; // HERE
            {BARRIER}
            s += tile[63 - i]; // THERE
            PLANT
        }}
        y[i] = s;
        """,
        BARRIER,
        "",
    ),
    "two threads write the same element": Case(
        "race",
        "tile",
        f"""
        threadgroup float tile[64];
        uint i = thread_index_in_threadgroup;
        tile[PLANT] = x[i]; // HERE
        {BARRIER}
        y[i] = tile[i / 2];
        """,
        "i",
        "i / 2",
    ),
    "the barrier is for other memory": Case(
        "race",
        "y",
        """
        uint i = thread_index_in_threadgroup;
        y[i] = x[i]; // THERE
        PLANT
        float v = y[63 - i]; // HERE
        threadgroup_barrier(mem_flags::mem_device);
        y[i] = v;
        """,
        DEVICE_BARRIER,
        BARRIER,
    ),
    "simdgroups need more than a simdgroup barrier": Case(
        "race",
        "tile",
        """
        threadgroup float tile[64];
        uint i = thread_index_in_threadgroup;
        tile[i] = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile[i] = x[i]; // THERE
        simdgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = tile[PLANT]; // HERE
        """,
        "i ^ 5",
        "i ^ 37",
    ),
    "a simdgroup without its barrier": Case(
        "race",
        "tile",
        """
        threadgroup half tile[64];
        simdgroup_half8x8 m;
        uint i = thread_index_in_simdgroup;
        for (uint j = i; j < 64; j += 32) tile[j] = half(x[j]); // THERE
        PLANT
        simdgroup_load(m, tile); // HERE
        y[i] = m.thread_elements()[0];
        """,
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
        "",
        grid=(32, 1, 1),
    ),
    "a plain read of what others change atomically": Case(
        "race",
        "y",
        """
        uint i = thread_index_in_threadgroup;
        atomic_fetch_add_explicit((device atomic_float*)y, 1.0f, memory_order_relaxed); // THERE
        PLANT
        if (i == 63) y[1] = y[0]; // HERE
        """,
        DEVICE_BARRIER,
        "",
        init_value=0,
        orders=("forward",),
    ),
    "device read out of bounds": Case(
        "out-of-bounds",
        "x",
        """
        uint i = thread_index_in_threadgroup;
        y[i] = x[PLANT]; // HERE
        """,
        "i",
        "i + 1",
    ),
    "device write out of bounds": Case(
        "out-of-bounds",
        "y",
        """
        uint i = thread_index_in_threadgroup;
        y[PLANT] = x[i]; // HERE
        """,
        "i",
        "i + 16000",
    ),
    "device write before the start": Case(
        "out-of-bounds",
        "y",
        """
        uint i = thread_index_in_threadgroup;
        y[int(i) - PLANT] = x[i]; // HERE
        """,
        "0",
        "1",
    ),
    "constant input out of bounds": Case(
        "out-of-bounds",
        "x",
        """
        uint i = thread_index_in_threadgroup;
        y[i] = x[i / PLANT]; // HERE
        """,
        "16",
        "8",
        inputs={"x": np.arange(4, dtype=np.float32)},
    ),
    "threadgroup write out of bounds": Case(
        "out-of-bounds",
        "tile",
        f"""
        threadgroup float tile[8][8];
        uint i = thread_index_in_threadgroup;
        tile[i / 8 + PLANT][i % 8] = x[i]; // HERE
        {BARRIER}
        y[i] = tile[i / 8][i % 8];
        """,
        "0",
        "1",
    ),
    "from one threadgroup array into the next": Case(
        "out-of-bounds",
        "left",
        f"""
        threadgroup float left[64];
        threadgroup float right[64];
        uint i = thread_index_in_threadgroup;
        right[i] = 0;
        left[i + PLANT] = x[i]; // HERE
        {BARRIER}
        y[i] = left[i] + right[i];
        """,
        "0",
        "64",
    ),
    "simdgroup_store over the edge": Case(
        "out-of-bounds",
        "y",
        """
        simdgroup_float8x8 m(1.0f);
        simdgroup_store(m, y + PLANT, 8); // HERE
        """,
        "0",
        "8",
        grid=(32, 1, 1),
    ),
    "uninitialised threadgroup memory": Case(
        "uninitialised",
        "tile",
        f"""
        threadgroup float tile[64];
        uint i = thread_index_in_threadgroup;
        if (PLANT) tile[i] = x[i];
        {BARRIER}
        y[i] = tile[63 - i]; // HERE
        """,
        "i < 64",
        "i < 63",
    ),
    "threadgroup memory does not outlive its threadgroup": Case(
        "uninitialised",
        "tile",
        f"""
        threadgroup float tile[32];
        uint i = thread_index_in_threadgroup;
        if (PLANT) tile[i] = x[i];
        {BARRIER}
        y[thread_position_in_grid.x] = tile[31 - i]; // HERE
        """,
        "true",
        "threadgroup_position_in_grid.x == 0",
        threadgroup=(32, 1, 1),
    ),
    "uninitialised output": Case(
        "uninitialised",
        "y",
        """
        uint i = thread_index_in_threadgroup;
        PLANT
        y[i] += x[i]; // HERE
        """,
        "y[i] = 0;",
        "",
    ),
    "a write to an input": Case(
        "read-only",
        "x",
        """
        uint i = thread_index_in_threadgroup;
        y[i] = 0;
        ((device float*)PLANT)[i] = 1; // HERE
        """,
        "y",
        "x",
    ),
    "a misaligned vector": Case(
        "misaligned",
        "x",
        """
        uint i = thread_index_in_threadgroup;
        y[i] = length(((const device float4*)(x + PLANT))[i / 16]); // HERE
        """,
        "4",
        "2",
    ),
}
