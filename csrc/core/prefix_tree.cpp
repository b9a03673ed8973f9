#include "pagedkv/prefix_tree.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "mix.h"
#include "pagedkv/error.h"

namespace pagedkv {
namespace {

uint64_t splitmix64(uint64_t x) {
  x *= 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

template <typename T>
int three_way(T a, T b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

}  // namespace

uint64_t fingerprint_of(uint64_t parent, std::span<const Token> tokens, std::string_view payload) {
  // The parent's comes last, so that the blocks of a prompt wait for each other but for one step.
  uint64_t value = kMix2;
  size_t i = 0;
  for (; i + 4 <= tokens.size(); i += 4) {
    uint64_t words[2];
    std::memcpy(words, &tokens[i], sizeof words);
    value = mix(words[0] ^ value, words[1] ^ kMix3);
  }
  for (; i < tokens.size(); ++i) value = mix(tokens[i] ^ value, kMix3);
  if (!payload.empty()) value = mix(value ^ hash_bytes(payload, 0), kMix1);
  return mix(parent ^ value, kMix1);
}

PrefixTree::PrefixTree(uint32_t block_size, size_t max_nodes, const Digest& root_digest,
                       bool broken_digests, uint64_t seed)
    : block_size_(block_size),
      seed_(seed),
      nodes_(max_nodes + 1),
      tokens_((max_nodes + 1) * block_size),
      digests_(max_nodes + 1),
      extras_(seed),
      broken_digests_(broken_digests) {
  digests_[kRoot] = root_digest;
  nodes_[kRoot].has_digest = true;
  unused_.reserve(max_nodes);
  for (size_t node = max_nodes; node > 0; --node) unused_.push_back(static_cast<NodeId>(node));
  if (broken_digests) extend_digest_index(max_nodes + 1);
}

BlockKey PrefixTree::key(NodeId node) const {
  const Node& n = nodes_[node];
  return {tokens(node), block_size_, n.payload, n.scope, n.first_offset, n.generation};
}

/// Siblings are ordered by (generation, scope, first_offset, tokens, payload). Blocks that may
/// share a run (equal scope) and lend equally much of it (equal first_offset) thus stand together,
/// in token order.
PrefixTree::Comparison PrefixTree::compare(const BlockKey& key, NodeId node) const {
  ++num_steps_;
  const Node& n = nodes_[node];
  if (key.generation != n.generation) return {three_way(key.generation, n.generation), 0};
  if (key.scope != n.scope) return {three_way(key.scope, n.scope), 0};
  if (key.first_offset != n.first_offset) return {three_way(key.first_offset, n.first_offset), 0};
  const Token* theirs = tokens(node);
  const Token* end = key.tokens + key.num_tokens;
  auto [ours, other] = std::mismatch(key.tokens, end, theirs);
  uint32_t num_run = static_cast<uint32_t>(ours - key.tokens);
  if (ours != end) return {three_way(*ours, *other), num_run};
  if (num_run < block_size_) return {0, num_run};
  return {three_way(key.payload, n.payload), num_run};
}

/// A node's fixed, well-mixed priority: keeps the treap balanced whatever order blocks arrive in.
/// The seed keeps others from choosing that order.
uint64_t PrefixTree::priority(NodeId node) const { return splitmix64((node + 1) ^ seed_); }

NodeId PrefixTree::find(NodeId parent, const BlockKey& key) const {
  if (key.payload == kUnknownExtras || key.scope == kUnknownExtras) return kNoNode;
  NodeId node = nodes_[parent].children;
  if (node == kNoNode) return kNoNode;
  // Most nodes have one child.
  const Node& n = nodes_[node];
  if (key.generation == n.generation && key.scope == n.scope && key.payload == n.payload &&
      key.first_offset == n.first_offset && are_equal(key.tokens, tokens(node), block_size_))
    return node;
  if (n.left == kNoNode && n.right == kNoNode) return kNoNode;
  while (node != kNoNode) {
    Comparison c = compare(key, node);
    if (c.order == 0) return node;
    node = c.order < 0 ? nodes_[node].left : nodes_[node].right;
  }
  return kNoNode;
}

PrefixTree::Run PrefixTree::longest_run(NodeId parent, const BlockKey& key) const {
  Run best;
  if (key.scope == kUnknownExtras) return best;
  // A child that carries no item lends most, so look there first. A child whose first item begins
  // at `offset` lends at most that much, and so does the key itself.
  BlockKey probe = key;
  for (uint32_t offset = block_size_; offset > best.num_tokens; --offset) {
    probe.first_offset = offset;
    NodeId node = nodes_[parent].children;
    while (node != kNoNode) {
      Comparison c = compare(probe, node);
      uint32_t num_run = std::min({c.num_run, offset, key.first_offset});
      if (num_run > best.num_tokens) best = {node, num_run};
      if (c.order == 0) break;
      node = c.order < 0 ? nodes_[node].left : nodes_[node].right;
    }
    if (!nodes_[parent].has_child_items) break;
  }
  return best;
}

NodeId PrefixTree::insert(NodeId parent, const BlockKey& key, const Digest* digest) {
  if (unused_.empty())
    throw IntegrityError("prefix tree: expected fewer nodes than pages, got none unused");
  NodeId node = unused_.back();
  unused_.pop_back();
  ++size_;
  Node& n = nodes_[node];
  n = Node{.parent = parent,
           .payload = key.payload,
           .scope = key.scope,
           .first_offset = key.first_offset,
           .generation = key.generation,
           .depth = parent == kRoot ? 0 : nodes_[parent].depth + 1,
           .tenant = nodes_[parent].tenant,
           .fingerprint = fingerprint_of(nodes_[parent].fingerprint, {key.tokens, block_size_},
                                         extras_.bytes(key.payload))};
  std::copy_n(key.tokens, block_size_, &tokens_[size_t{node} * block_size_]);
  if (digest != nullptr) {
    digests_[node] = *digest;
    n.has_digest = true;
  }
  if (key.first_offset < block_size_) nodes_[parent].has_child_items = true;

  // Go down past higher priorities, then split what lies below around the new node.
  NodeId* link = &nodes_[parent].children;
  while (*link != kNoNode && priority(*link) > priority(node)) {
    n.above = *link;
    link = before(node, *link) ? &nodes_[*link].left : &nodes_[*link].right;
  }
  NodeId rest = std::exchange(*link, node);
  NodeId *smaller = &n.left, *larger = &n.right;
  NodeId above_smaller = node, above_larger = node;
  while (rest != kNoNode) {
    Node& r = nodes_[rest];
    if (before(node, rest)) {
      *larger = rest;
      r.above = std::exchange(above_larger, rest);
      larger = &r.left;
      rest = *larger;
    } else {
      *smaller = rest;
      r.above = std::exchange(above_smaller, rest);
      smaller = &r.right;
      rest = *smaller;
    }
  }
  *smaller = *larger = kNoNode;
  if (node < num_indexed_) index_digest(node);
  return node;
}

/// The link that leads to a node: from its place among its siblings, or from its parent.
NodeId& PrefixTree::link_to(NodeId node) {
  Node& n = nodes_[node];
  if (n.above == kNoNode) return nodes_[n.parent].children;
  Node& above = nodes_[n.above];
  return above.left == node ? above.left : above.right;
}

void PrefixTree::remove(NodeId node) {
  Node& n = nodes_[node];
  NodeId* link = &link_to(node);
  NodeId above = n.above, left = n.left, right = n.right;
  while (left != kNoNode && right != kNoNode) {  // merge what hung below
    ++num_steps_;
    if (priority(left) > priority(right)) {
      *link = left;
      nodes_[left].above = std::exchange(above, left);
      link = &nodes_[left].right;
      left = *link;
    } else {
      *link = right;
      nodes_[right].above = std::exchange(above, right);
      link = &nodes_[right].left;
      right = *link;
    }
  }
  *link = left != kNoNode ? left : right;
  if (*link != kNoNode) nodes_[*link].above = above;
  if (nodes_[n.parent].children == kNoNode) nodes_[n.parent].has_child_items = false;
  extras_.release(n.payload);
  extras_.release(n.scope);
  if (node < num_indexed_) index_->remove(node);
  set_goes_first(node, false);
  n.parent = kNoNode;
  unused_.push_back(node);
  --size_;
}

Digest PrefixTree::next_digest(const Digest& parent, std::span<const Token> tokens,
                               std::string_view payload) const {
  ++num_digests_;
  if (broken_digests_) return {};
  return chain_next(parent, tokens,
                    {reinterpret_cast<const uint8_t*>(payload.data()), payload.size()});
}

const Digest& PrefixTree::digest(NodeId node) {
  if (nodes_[node].has_digest) return digests_[node];
  std::vector<NodeId>& missing = missing_;
  missing.clear();
  NodeId known = node;
  for (; !nodes_[known].has_digest; known = nodes_[known].parent) missing.push_back(known);
  std::ranges::reverse(missing);
  num_digests_ += missing.size();
  std::vector<BlockPayload>& payloads = payloads_;
  payloads.clear();
  for (size_t i = 0; i < missing.size(); ++i) {
    ExtrasId payload = nodes_[missing[i]].payload;
    if (payload == kNoExtras) continue;
    std::string_view bytes = extras_.bytes(payload);
    payloads.push_back({i, {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}});
  }
  if (broken_digests_) {
    for (NodeId child : missing) digests_[child] = {};
  } else {
    chain_places(digests_[known], block_size_, tokens_.data(), payloads, missing, digests_.data());
  }
  for (NodeId child : missing) nodes_[child].has_digest = true;
  return digests_[node];
}

NodeId PrefixTree::nearest(NodeId parent, const BlockKey& key) const {
  if (key.scope == kUnknownExtras) return kNoNode;
  BlockKey probe = key;
  probe.first_offset = block_size_;
  NodeId found = kNoNode;
  for (NodeId node = nodes_[parent].children; node != kNoNode;) {
    if (nodes_[node].scope == key.scope && nodes_[node].generation == key.generation) found = node;
    Comparison c = compare(probe, node);
    if (c.order == 0) break;
    node = c.order < 0 ? nodes_[node].left : nodes_[node].right;
  }
  return found;
}

void PrefixTree::extend_digest_index(size_t num_nodes) {
  if (!index_) {
    index_ = std::make_unique<DigestIndex>(digests_, capacity());
    num_indexed_ = 1;  // the root is no block
  }
  for (size_t end = std::min(num_indexed_ + num_nodes, nodes_.size()); num_indexed_ < end;
       ++num_indexed_)
    if (nodes_[num_indexed_].parent != kNoNode) index_digest(static_cast<NodeId>(num_indexed_));
}

void PrefixTree::index_digest(NodeId node) {
  const Digest& own = digest(node);
  bool is_alone = true;
  index_->find(own, [&](NodeId other) {
    is_alone = is_alone && nodes_[other].generation != nodes_[node].generation;
    return false;
  });
  if (!is_alone) ++num_collisions_;
  index_->add(node);
}

NodeId PrefixTree::find_digest(const Digest& digest, uint32_t generation) const {
  return index_->find(digest, [&](NodeId node) { return nodes_[node].generation == generation; });
}

std::optional<uint32_t> PrefixTree::generation_before(uint32_t generation) const {
  // Siblings are ordered by generation first.
  std::optional<uint32_t> found;
  for (NodeId node = nodes_[kRoot].children; node != kNoNode;) {
    bool is_before = nodes_[node].generation < generation;
    if (is_before) found = nodes_[node].generation;
    node = is_before ? nodes_[node].right : nodes_[node].left;
  }
  return found;
}

std::vector<NodeId> PrefixTree::checked_nodes() const {
  std::vector<NodeId> found{kRoot};
  std::vector<NodeId> stack;
  for (size_t i = 0; i < found.size(); ++i) {
    // An in-order walk must meet this node's children in strictly ascending order.
    NodeId previous = kNoNode;
    NodeId next = nodes_[found[i]].children;
    while (next != kNoNode || !stack.empty()) {
      for (; next != kNoNode; next = nodes_[next].left) stack.push_back(next);
      next = stack.back();
      stack.pop_back();
      NodeId above = nodes_[next].above;
      bool is_linked = above == kNoNode ? nodes_[found[i]].children == next
                                        : nodes_[above].left == next || nodes_[above].right == next;
      if (!is_linked || nodes_[next].parent != found[i] ||
          (previous != kNoNode && !before(previous, next)))
        throw IntegrityError("prefix tree: expected children in token order, got node " +
                             std::to_string(next) + " out of order under node " +
                             std::to_string(found[i]));
      found.push_back(next);
      if (found.size() > nodes_.size())
        throw IntegrityError("prefix tree: expected a tree, got a cycle");
      previous = next;
      next = nodes_[next].right;
    }
  }
  found.erase(found.begin());
  if (found.size() != size_)
    throw IntegrityError("prefix tree: expected " + std::to_string(size_) + " nodes, got " +
                         std::to_string(found.size()) + " below the root");
  return found;
}

}  // namespace pagedkv
