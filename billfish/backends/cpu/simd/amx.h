// AVX-512 with VNNI, and AMX tile registers.
#pragma once
#include "simd/avx512.h"
#include "simd/tile_registers.h"
