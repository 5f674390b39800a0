// Two threads write a value each and read the other's: ordered by a barrier, or racing for it.
// Usage: openmp_race ordered|race
#include <omp.h>

#include <cstdio>
#include <cstring>

int main(int argc, char** argv) {
  const bool ordered = argc == 2 && std::strcmp(argv[1], "ordered") == 0;
  int values[2] = {0, 0};
  int sum = 0;
  int threads = 0;
#pragma omp parallel num_threads(2) reduction(+ : sum)
  {
    const int mine = omp_get_thread_num();
    if (mine == 0) threads = omp_get_num_threads();
    for (int round = 1; round <= 100; ++round) {
      values[mine] = round;
      if (ordered) {
#pragma omp barrier
      }
      sum += values[1 - mine];
      if (ordered) {
#pragma omp barrier
      }
    }
  }
  std::printf("%d threads, sum %d\n", threads, sum);
  return threads == 2 && (!ordered || sum == 10100) ? 0 : 1;
}
