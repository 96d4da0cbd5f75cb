// The indexer's loss of a token, the gradients of its queries and weights, and what it contributes to those of its
// keys. backward_lists.cu has sorted its list; backward_rows.cu adds up what keys get.
//
//   grid   x token
//   CTA    8 warps; the token's heads stand in shared memory. Twice through the list:
//
//     scores       z = K.Q^T, the sum of w * relu(z) over heads; one bit a head, z > 0
//     divergence   both distributions, KL, and from them dI, which takes the scores' place
//     gradients    w * Q takes the place of Q. Keys come in tiles, two in turn, with their dI and bits:
//                  U += (bits * dI)^T.K,  C = dI * (bits.(w * Q)); then dq = w * U, dw = sum over columns of q * U
//
// The words on the left are those of the parts, under indexer_loss/; plan has what they share.
//
// Keys beyond the list's end are zeros, and so is their dI. Sums have one order, so bits follow from the token's own
// arguments.
//
// QUANTIZED: Q and K are e4m3 numbers (round_rows.cu), times a scale a head and a scale a key. A head's scale goes
// into its weight wherever Q is a factor; a key's into the score, and into the dI that U is made of, a second plane of
// them.
//
// Shared memory, bytes: 256 HEADS of Q, 4 HEADS of weights; twice a tile: keys 256, dI 4, times TILE_KEYS, and 8 HEADS
// of bits. 64 heads: 50,944; 128: 68,608. QUANTIZED: 4 HEADS of scales and 8 TILE_KEYS more.
#include "indexer/indexer_loss/divergence.cuh"
#include "indexer/indexer_loss/gradients.cuh"
#include "indexer/indexer_loss/scores.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) indexer_loss(const __grid_constant__ IndexerLossParams p) {
    const Token token = Token::of_cta(p);
    if (token.count > 0) {
        bring_heads(p, token);
        __syncthreads();
        compare(p, token, find_scores(p, token));
    } else if (threadIdx.x == 0) {
        p.divergences[token.index] = 0.0f;
    }
    if (p.contributions == nullptr) return;
    OfHeads u = {};
    const int tiles = ceil_div(token.count, TILE_KEYS);
    if (tiles > 0) {
        weigh_queries();
        bring_tile(p, token, 0);
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait<0>();
        __syncthreads();  // the tile is there, and all have read the one before
        if (tile + 1 < tiles) bring_tile(p, token, tile + 1);
        multiply_heads(tile, u);
        contribute(p, token, tile);
    }
    write_gradients(p, token, u);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
