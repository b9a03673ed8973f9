// The prefix tree against a list of blocks that is searched from end to end.

#include "pagedkv/prefix_tree.h"

#include <algorithm>
#include <string>
#include <vector>

#include "check.h"
#include "pagedkv/error.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

/// A block with its extras spelt out.
struct Block {
  std::vector<Token> tokens;
  std::string payload, scope;
  uint32_t first_offset, generation;

  bool operator==(const Block&) const = default;
};

class TreeAndList {
 public:
  TreeAndList(uint32_t block_size, size_t max_nodes, uint64_t seed)
      : block_size_(block_size), tree_(block_size, max_nodes, Digest{}), random_(seed) {}

  void change() {
    NodeId parent = any_node();
    Block block = any_block();
    BlockKey key = key_of(block, block_size_);
    CHECK(tree_.find(parent, key) == found(parent, block));
    if (tree_.find(parent, key) == kNoNode && tree_.size() < tree_.capacity()) {
      key.payload = tree_.extras().intern(block.payload);
      key.scope = tree_.extras().intern(block.scope);
      NodeId node = tree_.insert(parent, key);
      CHECK(tree_.parent(node) == parent);
      CHECK(std::equal(block.tokens.begin(), block.tokens.end(), tree_.tokens(node)));
      list_.push_back({node, parent, block});
      CHECK(tree_.find(parent, key) == node);
    }
    if (random_.one_in(2)) remove_a_leaf();
  }

  void remove_a_leaf() {
    if (list_.empty()) return;
    size_t start = random_.below(list_.size());
    for (size_t i = 0; i < list_.size(); ++i) {
      size_t place = (start + i) % list_.size();
      if (tree_.has_children(list_[place].node)) continue;
      tree_.remove(list_[place].node);
      list_.erase(list_.begin() + place);
      return;
    }
    CHECK(!"a tree with nodes has a leaf");
  }

  void look_up() {
    NodeId parent = any_node();
    Block block = any_block();
    BlockKey key = key_of(block, 1 + uint32_t(random_.below(block_size_)));
    PrefixTree::Run run = tree_.longest_run(parent, key);
    uint32_t longest = 0;
    for (const Listed& listed : list_) {
      if (listed.parent != parent) continue;
      uint32_t num_tokens = run_of(block, key.num_tokens, listed.block);
      longest = std::max(longest, num_tokens);
      if (listed.node == run.node) CHECK(run.num_tokens == num_tokens);
    }
    CHECK(run.num_tokens == longest);
    CHECK((run.node == kNoNode) == (longest == 0));
  }

  void check() {
    std::vector<NodeId> nodes = tree_.checked_nodes();
    CHECK(nodes.size() == list_.size() && tree_.size() == list_.size());
    std::vector<NodeId> expected;
    for (const Listed& listed : list_) expected.push_back(listed.node);
    std::sort(nodes.begin(), nodes.end());
    std::sort(expected.begin(), expected.end());
    CHECK(nodes == expected);
    for (const Listed& listed : list_) {
      CHECK(found(listed.parent, listed.block) == listed.node);
      CHECK(tree_.find(listed.parent, key_of(listed.block, block_size_)) == listed.node);
      CHECK(tree_.extras().bytes(tree_.key(listed.node).payload) == listed.block.payload);
    }
  }

  void empty() {
    while (!list_.empty()) remove_a_leaf();
    check();
    CHECK(!tree_.has_children(kRoot));
    CHECK(tree_.extras().size() == 1);  // the empty bytes alone
  }

 private:
  struct Listed {
    NodeId node, parent;
    Block block;
  };

  NodeId any_node() {
    // Mostly under the root, so that some node gets many children.
    if (list_.empty() || !random_.one_in(3)) return kRoot;
    return list_[random_.below(list_.size())].node;
  }

  Block any_block() {
    Block block{.tokens = std::vector<Token>(block_size_),
                .payload = "",
                .scope = "",
                .first_offset = block_size_,
                .generation = uint32_t(random_.one_in(8))};
    for (Token& token : block.tokens)
      token = random_.one_in(6) ? UINT32_MAX : Token(random_.below(2));
    if (random_.one_in(4)) block.scope = "salt";
    block.payload = block.scope;
    if (random_.one_in(3)) {
      block.first_offset = uint32_t(random_.below(block_size_));
      block.payload += "item " + std::to_string(random_.below(2));
    }
    return block;
  }

  BlockKey key_of(const Block& block, uint32_t num_tokens) {
    return {block.tokens.data(),
            num_tokens,
            tree_.extras().find(block.payload),
            tree_.extras().find(block.scope),
            block.first_offset,
            block.generation};
  }

  NodeId found(NodeId parent, const Block& block) const {
    for (const Listed& listed : list_)
      if (listed.parent == parent && listed.block == block) return listed.node;
    return kNoNode;
  }

  static uint32_t run_of(const Block& asked, uint32_t num_tokens, const Block& there) {
    if (asked.scope != there.scope || asked.generation != there.generation) return 0;
    uint32_t end = std::min({num_tokens, asked.first_offset, there.first_offset});
    uint32_t run = 0;
    while (run < end && asked.tokens[run] == there.tokens[run]) ++run;
    return run;
  }

  uint32_t block_size_;
  PrefixTree tree_;
  Random random_;
  std::vector<Listed> list_;
};

void compare(uint32_t block_size, size_t max_nodes, int num_rounds, uint64_t seed) {
  TreeAndList both(block_size, max_nodes, seed);
  for (int round = 0; round < num_rounds; ++round) {
    both.change();
    both.look_up();
    if (round % 64 == 0) both.check();
  }
  both.check();
  both.empty();
}

TEST(the_tree_finds_what_a_list_finds) {
  for (uint64_t seed = 0; seed < 20; ++seed) compare(4, 150, 2000, seed);
}

TEST(the_tree_finds_what_a_list_finds_with_blocks_of_any_size) {
  for (uint32_t block_size : {1, 2, 3, 16, 33}) compare(block_size, 60, 1500, block_size);
}

TEST(a_full_tree_refuses_a_block_and_stays_as_it_is) {
  PrefixTree tree(1, 1, Digest{});
  Token token = 0;
  auto key = [&] { return BlockKey{&token, 1, kNoExtras, kNoExtras, 1, 0}; };
  tree.insert(kRoot, key());
  token = 1;
  CHECK_THROWS(IntegrityError, tree.insert(kRoot, key()));
  CHECK(tree.checked_nodes().size() == 1);
}

}  // namespace
}  // namespace pagedkv::testing
