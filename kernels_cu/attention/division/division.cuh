// The division of work that this file is compiled for (DIVISION, cupy_mla/cuda/attention): how the launch's work items
// are dealt out to its CTAs. A CTA has turns (turn.cuh); in each turn it works on a split of an item. Every division
// is a struct with the members below. A kernel calls its functions in this order:
//
//   END               what is done with a turn's result (End)
//   ONE_TURN          a CTA has one turn
//   EQUAL_SPLITS      items are divided into equal splits
//   FOUND_EARLY       turns can be found while an earlier launch runs, unless lists have lengths, which it may write
//   State             what the division keeps in shared memory
//   begin             finds what does not depend on earlier launches; all threads call, and meet afterwards
//   is_idle           this CTA has no turn
//   HAS_WAITED        `begin` has waited for earlier launches if lists have lengths
//   finish            finds the rest, once earlier launches have ended; it may use SCRATCH_BYTES of shared memory. All
//                     threads call, and have met when it returns
//   num_turns         how many turns this CTA has
//   split_of          how many of the CTA's turns before this one had the same item
//   find_query        the index of a turn's query
//   find_turn         a turn's work item and tiles
//
//   join              says that this CTA has started (END MEET); one thread calls
//   end_turn          stores or merges the result of a turn, or writes it as a partial result; the consumers call
//   wait_for_earlier, count_earlier   wait for the partial results that earlier CTAs have of the item, and count them
//   announce          says that this CTA's partial result is written
//   leave             the producers call it in the end
//
// `end_turn` calls these members of the kernel's `Results`:
//
//   VALUES                   number of values in a chunk of a partial result (merge.cuh)
//   begins_item, ends_item   no split of the item comes before this one, or after it
//   is_first_warp, lane      of the calling consumer thread
//   sync                     the consumers' barrier
//   write(partials)          writes the turn's partial result
//   merge(partials)          MEET: merges this CTA's share of the output, once all partial results are written
//   keep(split)              KEEP: writes the partial result of a split; after the last split, merges all of them
//   finish                   STORE, LEAVE: merges earlier CTAs' partial results, if any, and stores the output
//   store                    stores the output
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
