// Runs the tests: all of them, or those whose names contain the argument.

#include <cstdio>
#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  const char* wanted = argc > 1 ? argv[1] : "";
  int num_run = 0;
  for (const auto& test : pagedkv::testing::Test::all()) {
    if (std::strstr(test.name, wanted) == nullptr) continue;
    std::fprintf(stderr, "%s\n", test.name);
    test.run();
    ++num_run;
  }
  std::fprintf(stderr, "%d tests passed\n", num_run);
  return num_run == 0;
}
