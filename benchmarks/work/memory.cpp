// What memory gives at most: pages read, and bytes copied, by one thread or several.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// Runs work(thread) on so many threads, one of them the caller's.
template <typename Work>
void share(int num_threads, Work work) {
  std::vector<std::thread> others;
  for (int i = 1; i < num_threads; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
}

uint64_t read_page(const char* page, uint64_t num_bytes) {
  typedef uint64_t Vector __attribute__((vector_size(64)));
  const auto* words = reinterpret_cast<const Vector*>(page);
  Vector sums[4] = {};
  for (uint64_t i = 0; i + 4 <= num_bytes / sizeof(Vector); i += 4)
    for (int j = 0; j < 4; ++j) sums[j] ^= words[i + j];
  Vector sum = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  uint64_t all = 0;
  for (int j = 0; j < 8; ++j) all ^= sum[j];
  return all;
}

}  // namespace

extern "C" {

// Reads pages that lie anywhere, in the order of their ids. page_bytes is a multiple of 256.
uint64_t read_pages(const char* memory, const int32_t* ids, uint64_t num_pages, uint64_t page_bytes,
                    int num_threads) {
  std::vector<uint64_t> sums(16 * num_threads);
  share(num_threads, [&](int thread) {
    uint64_t sum = 0, end = num_pages * (thread + 1) / num_threads;
    for (uint64_t i = num_pages * thread / num_threads; i < end; ++i)
      sum ^= read_page(memory + static_cast<uint64_t>(ids[i]) * page_bytes, page_bytes);
    sums[16 * thread] = sum;
  });
  uint64_t sum = 0;
  for (uint64_t part : sums) sum ^= part;
  return sum;
}

void copy_bytes(char* to, const char* from, uint64_t num_bytes, int num_threads) {
  share(num_threads, [&](int thread) {
    uint64_t begin = num_bytes * thread / num_threads, end = num_bytes * (thread + 1) / num_threads;
    memcpy(to + begin, from + begin, end - begin);
  });
}
}
