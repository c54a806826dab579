// One step of a search by a team of threads: each takes its share of the rows through the stack, and all rank what is
// ready.
#pragma once

#include <ATen/Parallel.h>

#include <omp.h>

#include <vector>

#include "search/logits_topk.h"

namespace {
namespace panels {

inline void run_batch(const Batch& batch, LogitsTopK& out) {
  const int64_t rows = int64_t(batch.rows.size()), vectors = (rows + LANES - 1) / LANES;
  const int threads = at::in_parallel_region() ? 1 : int(std::min<int64_t>(at::get_num_threads(), vectors));
  PanelQueue queue;
  ThreadErrors errors;
#pragma omp parallel num_threads(std::max(1, threads))
  {
    const int64_t number = omp_get_thread_num(), count = omp_get_num_threads();  // perhaps fewer than were asked for
    errors.run([&] {
      thread_local std::vector<float>
          memory;  // kept between steps: fresh pages would cost more than what is written to them
      BatchShare share(batch, vectors * number / count * LANES, std::min(rows, vectors * (number + 1) / count * LANES),
                       memory);
      share.run();
      queue.add(share.panels);
    });
    queue.close();
    errors.run([&] {
      for (std::vector<Panel> taken; !(taken = queue.take(count)).empty();) rank_panels(taken, out);
    });
  }
  errors.rethrow();
}

}  // namespace panels
}  // namespace
