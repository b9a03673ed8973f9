// The tree of logical blocks.
//
// A node is one block: its parent, its tokens and its extras. The children of a node are kept in
// token order in a treap (Seidel & Aragon, "Randomized Search Trees", 1996), linked through the
// nodes themselves. A search compares tokens with tokens, so whatever it finds is proved equal and
// no hash is trusted; and since both neighbours of an absent key lie on its search path, the same
// descent yields the child with the longest common run of tokens. Both take O(log children).

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "pagedkv/block_hash.h"
#include "pagedkv/digest_index.h"
#include "pagedkv/extras.h"
#include "pagedkv/line_vector.h"
#include "pagedkv/types.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace pagedkv {

/// Whether `size` tokens are equal. The usual 16 are written out.
inline bool are_equal(const Token* a, const Token* b, uint32_t size) {
  if (size != 16) return std::equal(a, a + size, b);
#ifdef __SSE2__
  const auto differences = [&](int i) {
    return _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i)),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i)));
  };
  const __m128i any = _mm_or_si128(_mm_or_si128(differences(0), differences(4)),
                                   _mm_or_si128(differences(8), differences(12)));
  return _mm_movemask_epi8(_mm_cmpeq_epi8(any, _mm_setzero_si128())) == 0xffff;
#else
  // Nearly always they are, so eight branches that are never taken cost less than to fold eight
  // differences into one.
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    uint64_t x, y;
    std::memcpy(&x, a + i, sizeof x);
    std::memcpy(&y, b + i, sizeof y);
    if (x != y) return false;
  }
  return true;
#endif
}

/// The fingerprint of a block: of all before it, its tokens and its extras.
uint64_t fingerprint_of(uint64_t parent, std::span<const Token> tokens, std::string_view payload);

/// What identifies a block among the children of its parent.
struct BlockKey {
  const Token* tokens;
  uint32_t num_tokens;    // block_size, or fewer for a tail that only longest_run() may look for
  ExtrasId payload;       // everything that enters the digest
  ExtrasId scope;         // its request-wide part
  uint32_t first_offset;  // where its first media or embedding item begins, else block_size
  uint32_t generation;    // blocks of different generations never match
};

class PrefixTree {
 public:
  struct Run {
    NodeId node = kNoNode;
    uint32_t num_tokens = 0;
  };

  /// Holds up to `max_nodes` blocks besides the root; all memory is taken here.
  /// @param broken_digests  for tests: all digests are equal, and indexed at once
  /// @param seed            of the shape of the tree, which nothing else depends on
  PrefixTree(uint32_t block_size, size_t max_nodes, const Digest& root_digest,
             bool broken_digests = false, uint64_t seed = 0);

  /// The child of `parent` that equals `key`, or kNoNode.
  NodeId find(NodeId parent, const BlockKey& key) const;

  /// The child whose first tokens agree with the key's for longest, under the rule for partial
  /// runs: its scope equals the key's, and the run ends where a media or embedding item of either
  /// begins. An empty run has no node.
  Run longest_run(NodeId parent, const BlockKey& key) const;

  // Walking a long path that has left the caches waits for memory at every node. Hints tell where
  // the path went last time, so that its nodes are fetched ahead; a wrong one costs nothing.

  static constexpr size_t kHintDistance = 16;

  void fetch(NodeId node) const { __builtin_prefetch(&nodes_[node], 1); }
  /// Fetches what insert() and digest() will write, in a place that was just given up.
  void fetch_unused(NodeId node) const {
    __builtin_prefetch(&tokens_[size_t{node} * block_size_], 1);
    __builtin_prefetch(&digests_[node], 1);
  }
  /// A path has reached its node number `index`.
  void leave_hint(std::span<const NodeId> path, size_t index) {
    if (index < kHintDistance) return;
    NodeId& hint = nodes_[path[index - kHintDistance]].hint;
    if (hint != path[index]) hint = path[index];
  }

  static constexpr uint32_t kUsualBlockSize = 16;

  template <uint32_t kBlockSize>
  class Reader;
  /// For a loop over many nodes, while nobody changes the tree. `kBlockSize` is the tree's, or 0
  /// for whatever that is.
  template <uint32_t kBlockSize>
  Reader<kBlockSize> reader() const {
    return Reader<kBlockSize>(*this);
  }

  /// Adds a child that find() doesn't know. The ids in `key` pass to the tree with one reference
  /// each. `digest` is its digest, or null when nobody has computed it yet.
  NodeId insert(NodeId parent, const BlockKey& key, const Digest* digest = nullptr);

  /// Removes a node without children.
  void remove(NodeId node);

  // How many need a node to stay, whether it has pages or not; whoever removes nodes asks.

  void pin(NodeId node) { ++nodes_[node].num_pins; }
  void unpin(NodeId node) { --nodes_[node].num_pins; }
  uint32_t num_pins(NodeId node) const { return nodes_[node].num_pins; }

  NodeId parent(NodeId node) const { return nodes_[node].parent; }
  bool has_children(NodeId node) const { return nodes_[node].children != kNoNode; }
  uint32_t generation(NodeId node) const { return nodes_[node].generation; }
  /// The index of the block in its prompt.
  uint32_t depth(NodeId node) const { return nodes_[node].depth; }
  /// Whom the block belongs to.
  TenantId tenant(NodeId node) const { return nodes_[node].tenant; }
  void set_tenant(NodeId node, TenantId tenant) { nodes_[node].tenant = tenant; }
  /// Whether the block goes ahead of all that nobody asked to keep; see BlockPool::last_turn().
  bool goes_first(NodeId node) const { return nodes_[node].goes_first; }
  void set_goes_first(NodeId node, bool value) {
    num_going_first_ += value - nodes_[node].goes_first;
    nodes_[node].goes_first = value;
  }
  size_t num_going_first() const { return num_going_first_; }
  /// Whether no two blocks follow the node.
  bool has_one_child_at_most(NodeId node) const {
    NodeId child = nodes_[node].children;
    return child == kNoNode || (nodes_[child].left == kNoNode && nodes_[child].right == kNoNode);
  }
  /// Stands for all that identifies a block, for the eviction history. Not cryptographic.
  uint64_t fingerprint(NodeId node) const { return nodes_[node].fingerprint; }
  const Token* tokens(NodeId node) const { return &tokens_[size_t{node} * block_size_]; }
  BlockKey key(NodeId node) const;
  size_t size() const { return size_; }
  size_t capacity() const { return nodes_.size() - 1; }

  /// The digest of a node; computed once, together with those of its ancestors that lack theirs.
  const Digest& digest(NodeId node);

  /// The digest of a block that need not be in the tree.
  Digest next_digest(const Digest& parent, std::span<const Token> tokens,
                     std::string_view payload) const;

  /// The latest generation before `generation` that has blocks; nullopt when there is none.
  std::optional<uint32_t> generation_before(uint32_t generation) const;

  /// The child that comes next to `key` in token order and has its scope, or kNoNode: what stands
  /// in the key's place.
  NodeId nearest(NodeId parent, const BlockKey& key) const;

  // Look-up by digest. Whoever asks for it first pays for the digests that nobody asked for before.

  bool has_digest_index() const { return num_indexed_ > capacity(); }
  /// Indexes some nodes more; has_digest_index() says when it is done.
  void extend_digest_index(size_t num_nodes);
  /// The node of a generation that `digest` names alone, or kNoNode.
  NodeId find_digest(const Digest& digest, uint32_t generation) const;
  /// How many nodes got a digest that another one of their generation had.
  uint64_t num_collisions() const { return num_collisions_; }

  ExtrasTable& extras() { return extras_; }
  const ExtrasTable& extras() const { return extras_; }

  // For tests of what a call costs: how many blocks were hashed, and how many steps were made among
  // siblings to find, add and remove nodes. Neither may grow with the tree.
  uint64_t num_digests() const { return num_digests_; }
  uint64_t num_steps() const { return num_steps_; }

  /// Throws IntegrityError unless the order of every node's children holds. Returns the live nodes,
  /// parents first.
  std::vector<NodeId> checked_nodes() const;

 private:
  struct alignas(64) Node {  // one line of the cache
    NodeId parent = kNoNode;
    NodeId children = kNoNode;  // root of the treap of this node's children
    NodeId left = kNoNode;      // the node's place in the treap of its siblings
    NodeId right = kNoNode;
    NodeId above =
        kNoNode;  // none for the root of the treap; makes removal independent of its size
    ExtrasId payload = kNoExtras;
    ExtrasId scope = kNoExtras;
    uint32_t first_offset = 0;
    uint32_t generation = 0;
    uint32_t depth = 0;
    TenantId tenant = kNobody;
    NodeId hint = kNoNode;  // a node kHintDistance blocks below that was on a path through this one
    uint64_t fingerprint = 0;
    bool has_digest = false;
    bool has_child_items = false;  // some child ever carried a media or embedding item
    bool goes_first = false;
    uint32_t num_pins = 0;  // see pin()
  };
  static_assert(sizeof(Node) == 64);

  struct Comparison {
    int order;         // < 0: the key comes first, 0: equal as far as the key reaches
    uint32_t num_run;  // common tokens; 0 unless scope and first_offset agree
  };
  Comparison compare(const BlockKey& key, NodeId node) const;
  NodeId& link_to(NodeId node);
  void index_digest(NodeId node);
  bool before(NodeId a, NodeId b) const { return compare(key(a), b).order < 0; }

  uint64_t priority(NodeId node) const;

  uint32_t block_size_;
  uint64_t seed_;
  size_t size_ = 0, num_going_first_ = 0;
  std::vector<Node> nodes_;
  LineVector<Token> tokens_;     // [max_nodes + 1, block_size]
  std::vector<Digest> digests_;  // [max_nodes + 1]
  std::vector<NodeId> unused_;
  ExtrasTable extras_;
  bool broken_digests_;
  std::unique_ptr<DigestIndex> index_;  // made when somebody looks a digest up
  size_t num_indexed_ = 0;              // of the nodes below it, all live ones are in the index
  uint64_t num_collisions_ = 0;
  mutable uint64_t num_digests_ = 0, num_steps_ = 0;
  // Of digest() alone; kept, since to grow them takes a while.
  std::vector<NodeId> missing_;
  std::vector<BlockPayload> payloads_;
};

/// What most steps down the tree need: no search, and where things lie is known for all of them.
template <uint32_t kBlockSize>
class PrefixTree::Reader {
 public:
  explicit Reader(const PrefixTree& tree)
      : nodes_(tree.nodes_.data()),
        tokens_(tree.tokens_.data()),
        extras_(tree.extras_),
        block_size_(tree.block_size_) {}

  uint32_t block_size() const { return kBlockSize > 0 ? kBlockSize : block_size_; }
  /// Some child of `parent`, or kNoNode. Most nodes have one.
  NodeId some_child(NodeId parent) const { return nodes_[parent].children; }
  /// Whether `node`, which may be no node any more, is the child of `parent` that find() would look
  /// for. `extras` are null for a block that has none.
  bool is_child(NodeId node, NodeId parent, const Token* tokens, const BlockExtras* extras,
                uint32_t generation) const {
    if (extras == nullptr) return is_plain_child(node, parent, tokens, generation);
    const Node& n = nodes_[node];
    return n.parent == parent && n.generation == generation && carries(n, *extras) &&
           are_equal(tokens, tokens_of(node), block_size());
  }
  /// The same for a block without extras.
  bool is_plain_child(NodeId node, NodeId parent, const Token* tokens, uint32_t generation) const {
    const Node& n = nodes_[node];
    return n.parent == parent && n.generation == generation && n.payload == kNoExtras &&
           are_equal(tokens, tokens_of(node), block_size());
  }
  /// Fetches what a walk will need kHintDistance nodes later, if it goes where the last one through
  /// `node` went. Returns the node fetched, or kNoNode.
  NodeId fetch_ahead(NodeId node) const {
    NodeId hint = nodes_[node].hint;
    if (hint == kNoNode) return hint;
    __builtin_prefetch(&nodes_[hint]);
    __builtin_prefetch(tokens_of(hint));
    return hint;
  }

 private:
  const Token* tokens_of(NodeId node) const { return &tokens_[size_t{node} * block_size()]; }
  bool carries(const Node& node, const BlockExtras& extras) const {
    return !extras.is_torn && node.first_offset == extras.first_offset &&
           extras_.bytes(node.payload) == extras.payload &&
           extras_.bytes(node.scope) == extras.scope;
  }

  const Node* nodes_;
  const Token* tokens_;
  const ExtrasTable& extras_;
  uint32_t block_size_;
};

}  // namespace pagedkv
