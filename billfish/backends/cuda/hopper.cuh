// Hopper's own: barriers in shared memory, copies that complete on them, and clusters of CTAs.
#pragma once
#include "device.cuh"

struct __align__(64) TensorMap { u64 opaque[16]; };

DEVICE void barrier_init(u32 bar, int arrivals) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals)); }
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(bar), "r"(parity) : "memory");
}
DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// A box of a tensor map, its corner at (column, row).
DEVICE void copy_box(u32 to, const TensorMap* map, u32 bar, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row) : "memory");
}
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
// Of `threads` threads that name the same barrier.
DEVICE void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// True for one lane of a warp, in a way that the compiler understands.
DEVICE bool elect() {
  u32 r;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(r));
  return r;
}
DEVICE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEVICE void cluster_assemble() { asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
// All threads of a cluster; what they wrote to shared memory before is seen by all after.
DEVICE void cluster_meet() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE float2 load_cluster(u32 address) { float2 r; asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address)); return r; }
DEVICE u32 cluster_address(u32 address, u32 rank) { u32 r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank)); return r; }
// 16 bytes to the shared memory of a CTA of the cluster, completing on a barrier there.
DEVICE void store_async(u32 to, float4 v, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar) : "memory");
}
DEVICE void store_matrices_transposed(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
DEVICE void store_matrices_transposed(u32 address, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(r[0]), "r"(r[1]) : "memory");
}
