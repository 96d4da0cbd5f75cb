// The division of work that this file is compiled for (DIVISION, cupy_mla/cuda/attention): how the launch's work items
// are dealt out to its CTAs. A CTA has turns (turn.cuh). Every division is a struct with the same members:
//
//   END               what becomes of a turn's result (End)
//   ONE_TURN          a CTA has one turn
//   EQUAL_SPLITS      items are divided into equal splits
//   FOUND_EARLY       turns are found while an earlier launch runs, unless lists have lengths, which it may write
//   State             what the division keeps in shared memory
//   begin             finds what no earlier launch writes; all threads call, then the CTA meets
//   is_idle           there is no turn for this CTA
//   HAS_WAITED        begin has waited for earlier launches where lists have lengths
//   finish            finds the rest, once earlier launches have ended, with SCRATCH_BYTES of shared memory; all threads
//                     call, and have met when it returns
//   num_turns         how many turns this CTA has
//   split_of          how many turns of the CTA before this one had the same item
//   find_query        the number of a turn's query
//   find_turn         a turn's work item and tiles
//
//   join              says that this CTA has started; one thread calls, if END is MEET
//   end_turn          stores, merges or leaves the result of a turn; the threads that hold it call
//   wait_for_earlier, count_earlier   wait for the partial results that earlier CTAs have left of the item, and count them
//   announce          says that this CTA has left its own
//   leave             what the other threads of the CTA call in the end
//
// `end_turn` calls members of the kernel's `Results`, each by what it needs:
//
//   VALUES                   a chunk's values in partial results (merge.cuh)
//   begins_item, ends_item   whether no split of the item is before this one, or behind it
//   is_first_warp, lane      of the threads that hold results
//   sync                     their barrier
//   write(partials)          writes the turn's partial result
//   merge(partials)          MEET: merges this CTA's share of the output; all partial results are there
//   keep(split)              KEEP: writes the partial result of a split, or merges all behind the last
//   finish                   STORE, LEAVE: merges the earlier CTAs' partial results, and stores the item's
//   store                    stores the item's results
#pragma once

enum { WHOLE = 0, CLUSTERS = 1, SHARES = 2, SEGMENTS = 3, TEAMS = 4, REQUESTS = 5 };  // DIVISION

#if DIVISION == 0
#include "attention/division/whole.cuh"
template <int>
using DivisionOf = Whole;
#elif DIVISION == 1
#include "attention/division/clusters.cuh"
template <int>
using DivisionOf = Clusters;
#elif DIVISION == 2
#include "attention/division/shares.cuh"
template <int THREADS>
using DivisionOf = Shares<THREADS>;
#elif DIVISION == 3
#include "attention/division/segments.cuh"
template <int>
using DivisionOf = Segments;
#elif DIVISION == 4
#include "attention/division/teams.cuh"
template <int THREADS>
using DivisionOf = Teams<THREADS>;
#elif DIVISION == 5
#include "attention/division/request_shares.cuh"
template <int THREADS>
using DivisionOf = RequestShares<THREADS>;
#endif
