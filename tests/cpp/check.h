// A test is a function. A check that fails ends the process, as the sanitizers and fuzzers want it.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace pagedkv::testing {

struct Test {
  const char* name;
  void (*run)();

  static std::vector<Test>& all() {
    static std::vector<Test> tests;
    return tests;
  }
};

[[noreturn]] inline void fail(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
  std::abort();
}

}  // namespace pagedkv::testing

#define TEST(name)                                                      \
  static void name();                                                   \
  static const bool name##_is_listed =                                  \
      (::pagedkv::testing::Test::all().push_back({#name, name}), true); \
  static void name()

#define CHECK(...) \
  ((__VA_ARGS__) ? (void)0 : ::pagedkv::testing::fail(__FILE__, __LINE__, #__VA_ARGS__))

/// Checks that the expression throws exactly this exception.
#define CHECK_THROWS(type, ...)                \
  [&] {                                        \
    try {                                      \
      (void)(__VA_ARGS__);                     \
    } catch (const type&) {                    \
      return;                                  \
    }                                          \
    CHECK(!"throws " #type ": " #__VA_ARGS__); \
  }()
