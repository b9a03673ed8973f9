#include "extras.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "bindings.h"
#include "lists.h"
#include "pagedkv/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

constexpr uint8_t kSalt = 1, kAdapter = 2, kMedia = 3, kEmbeddings = 4;
constexpr size_t kLongestSalt = 128;
constexpr int64_t kLastPosition = std::numeric_limits<int32_t>::max();

/// A dataclass of pagedkv/extras.py. Its fields are slots, which are read where they lie: to ask
/// the object for three of them takes as long as to hash a block. Kept for good.
class ExtraClass {
 public:
  ExtraClass(const nb::module_& module, const char* name, std::vector<const char*> fields)
      : type_(nb::object(module.attr(name)).release().ptr()), names_(std::move(fields)) {
    for (const char* field : names_)
      offsets_.push_back(slot_offset(reinterpret_cast<PyTypeObject*>(type_), field));
  }

  bool is_exactly(nb::handle object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == type_;
  }
  bool is(nb::handle object) const { return is_exactly(object) || nb::isinstance(object, type_); }

  nb::object field(nb::handle object, size_t i) const {
    if (is_exactly(object) && offsets_[i] >= 0) {
      auto* bytes = reinterpret_cast<std::byte*>(object.ptr());
      if (PyObject* value = *reinterpret_cast<PyObject**>(bytes + offsets_[i]))
        return nb::borrow(value);
    }
    return object.attr(names_[i]);
  }

 private:
  PyObject* type_;
  std::vector<const char*> names_;
  std::vector<Py_ssize_t> offsets_;
};

struct ExtraClasses {
  nb::module_ module = nb::module_::import_("pagedkv.extras");
  ExtraClass media{module, "Media", {"start", "length", "digest"}};
  ExtraClass adapter{module, "Adapter", {"id", "revision"}};
  ExtraClass embeddings{module, "Embeddings", {"positions", "digest"}};
  ExtraClass extra{module, "Extra", {"tag", "payload"}};

  static const ExtraClasses& get() {
    static const ExtraClasses* classes = new ExtraClasses;  // outlives the interpreter
    return *classes;
  }
};

/// The bytes of bytes or, as UTF-8, of a str, for as long as the object lives; none for anything
/// else and for text that UTF-8 can't express.
std::optional<std::string_view> bytes_of(nb::handle object) {
  if (PyBytes_Check(object.ptr()))
    return std::string_view(PyBytes_AS_STRING(object.ptr()),
                            static_cast<size_t>(PyBytes_GET_SIZE(object.ptr())));
  if (!PyUnicode_Check(object.ptr())) return std::nullopt;
  Py_ssize_t size;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string_view(text, static_cast<size_t>(size));
}

/// The same of a field that was checked when its object was made.
std::string_view field_bytes(nb::handle field) {
  if (const auto bytes = bytes_of(field)) return *bytes;
  throw nb::type_error("a field of an extra was replaced by something else");
}

int64_t to_int(nb::handle number) {
  const long long value = PyLong_AsLongLong(number.ptr());
  if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
  return value;
}

/// Collects entries, each with the block that it belongs to, and puts them in order.
class Encoder {
 public:
  Encoder(size_t num_tokens, uint32_t block_size)
      : num_tokens_(static_cast<int64_t>(num_tokens)), block_size_(block_size) {}

  void add_salt(int64_t position, std::string_view salt) {
    start_entry(position / block_size_, kSalt, salt.size());
    bytes_ += salt;
  }

  void add_adapter(nb::handle adapter, const ExtraClass& fields) {
    const nb::object id = fields.field(adapter, 0), revision = fields.field(adapter, 1);
    const std::string_view id_bytes = field_bytes(id), revision_bytes = field_bytes(revision);
    start_entry(0, kAdapter, 4 + id_bytes.size() + revision_bytes.size());
    add_number(id_bytes.size(), 4);
    bytes_ += id_bytes;
    bytes_ += revision_bytes;
  }

  void add_own(nb::handle extra, const ExtraClass& fields) {
    const nb::object payload = fields.field(extra, 1);
    const std::string_view payload_bytes = field_bytes(payload);
    const auto tag = static_cast<uint8_t>(to_int(fields.field(extra, 0)));
    start_entry(0, tag, payload_bytes.size());
    bytes_ += payload_bytes;
  }

  void add_media(nb::handle media, const ExtraClass& fields, size_t index) {
    const int64_t start = to_int(fields.field(media, 0));
    const int64_t end = check_range(start, to_int(fields.field(media, 1)), index);
    const nb::object digest = fields.field(media, 2);
    const std::string_view digest_bytes = field_bytes(digest);
    for (int64_t block = start / block_size_; block * block_size_ < end; ++block) {
      const int64_t offset = start - block * block_size_;
      start_entry(block, kMedia, 4 + digest_bytes.size(), std::max<int64_t>(offset, 0));
      add_number(static_cast<uint64_t>(offset), 4);
      bytes_ += digest_bytes;
    }
  }

  void add_embeddings(nb::handle embeddings, const ExtraClass& fields, size_t index) {
    const auto positions = nb::cast<std::vector<int64_t>>(fields.field(embeddings, 0));
    for (int64_t position : positions) check_range(position, 1, index);
    const nb::object digest = fields.field(embeddings, 1);
    const std::string_view digest_bytes = field_bytes(digest);
    for (size_t i = 0, next; i < positions.size(); i = next) {
      const int64_t block = positions[i] / block_size_;
      next = i;
      while (next < positions.size() && positions[next] / block_size_ == block) ++next;
      start_entry(block, kEmbeddings, 2 * (1 + next - i) + digest_bytes.size(),
                  positions[i] % block_size_);
      add_number(next - i, 2);
      for (size_t j = i; j < next; ++j)
        add_number(static_cast<uint64_t>(positions[j] % block_size_), 2);
      bytes_ += digest_bytes;
    }
  }

  std::vector<BlockExtras> finish() {
    std::vector<BlockExtras> blocks;
    end_entry();
    const auto comes_before = [this](const Entry& a, const Entry& b) {
      if (a.block != b.block) return a.block < b.block;
      if (a.tag != b.tag) return a.tag < b.tag;
      return bytes_of(a).substr(kHeadBytes) < bytes_of(b).substr(kHeadBytes);
    };
    if (!std::is_sorted(entries_.begin(), entries_.end(), comes_before))
      std::sort(entries_.begin(), entries_.end(), comes_before);
    blocks.reserve(entries_.size());
    for (const Entry& entry : entries_) {
      if (blocks.empty() || blocks.back().block_index != entry.block)
        blocks.push_back({.block_index = entry.block,
                          .payload = {},
                          .scope = {},
                          .first_offset = static_cast<uint32_t>(block_size_)});
      BlockExtras& block = blocks.back();
      block.payload += bytes_of(entry);
      if (entry.tag != kMedia && entry.tag != kEmbeddings) block.scope += bytes_of(entry);
      block.first_offset = std::min(block.first_offset, entry.offset);
    }
    return blocks;
  }

 private:
  static constexpr size_t kHeadBytes = 5;  // the tag and the length of the payload

  struct Entry {
    uint32_t block;
    uint32_t offset;  // where in the block a media item or embedding begins, else its end
    uint8_t tag;
    size_t begin, end;  // in bytes_
  };

  std::string_view bytes_of(const Entry& entry) const {
    return std::string_view(bytes_).substr(entry.begin, entry.end - entry.begin);
  }

  void add_number(uint64_t number, int num_bytes) {
    for (; num_bytes > 0; --num_bytes, number >>= 8) bytes_ += static_cast<char>(number & 0xff);
  }

  void start_entry(int64_t block, uint8_t tag, size_t num_payload_bytes, int64_t offset = -1) {
    end_entry();
    const int64_t first = offset < 0 ? block_size_ : offset;
    entries_.push_back(
        {static_cast<uint32_t>(block), static_cast<uint32_t>(first), tag, bytes_.size(), 0});
    add_number(tag, 1);
    add_number(num_payload_bytes, 4);
  }

  void end_entry() {
    if (!entries_.empty()) entries_.back().end = bytes_.size();
  }

  /// The end of an item.
  int64_t check_range(int64_t start, int64_t length, size_t index) const {
    const bool is_range =
        start >= 0 && start <= kLastPosition && length >= 1 && length <= kLastPosition;
    if (is_range && start + length <= num_tokens_) return start + length;
    throw UsageError("extras[" + std::to_string(index) + "]: expected to end within the " +
                     std::to_string(num_tokens_) + " tokens, got " +
                     (is_range ? "an end of " + std::to_string(start + length) : "no range"));
  }

  const int64_t num_tokens_, block_size_;
  std::vector<Entry> entries_;
  std::string bytes_;  // of all entries, in the order in which they were added
};

/// `salt_from` as a position; check_salt_from has the messages.
int64_t to_position(nb::handle salt_from, nb::handle cache_salt) {
  if (salt_from.is_none()) return 0;
  if (PyLong_CheckExact(salt_from.ptr()) && !cache_salt.is_none()) {
    int overflow = 0;
    const long long position = PyLong_AsLongLongAndOverflow(salt_from.ptr(), &overflow);
    if (overflow == 0 && position >= 0 && position <= kLastPosition) return position;
  }
  return to_int(ExtraClasses::get().module.attr("check_salt_from")(salt_from, cache_salt));
}

void add_extra(Encoder& encoder, nb::handle object, size_t index) {
  const ExtraClasses& classes = ExtraClasses::get();
  if (classes.media.is(object)) return encoder.add_media(object, classes.media, index);
  if (classes.adapter.is(object)) return encoder.add_adapter(object, classes.adapter);
  if (classes.embeddings.is(object))
    return encoder.add_embeddings(object, classes.embeddings, index);
  if (classes.extra.is(object)) return encoder.add_own(object, classes.extra);
  classes.module.attr("refuse_extra")(object, index);
}

void add_extras(Encoder& encoder, nb::handle extras) {
  if (extras.is_none()) return;
  nb::object list = nb::borrow(extras);
  if (!PyList_CheckExact(list.ptr()) && !PyTuple_CheckExact(list.ptr()))
    list = nb::list(ExtraClasses::get().module.attr("check_iterable")("extras", extras));
  // A field of a subclass may be computed by Python code, so the length is read anew each time.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list.ptr()); ++i) {
    const nb::object object = nb::borrow(PySequence_Fast_GET_ITEM(list.ptr(), i));
    add_extra(encoder, object, static_cast<size_t>(i));
  }
}

/// For pagedkv/extras.py.
std::tuple<std::vector<uint32_t>, std::vector<nb::bytes>, std::vector<nb::bytes>,
           std::vector<uint32_t>>
encode_extras(size_t num_tokens, uint32_t block_size, nb::handle cache_salt, nb::handle salt_from,
              nb::handle extras) {
  std::vector<uint32_t> block_indices, first_offsets;
  std::vector<nb::bytes> payloads, scopes;
  for (const BlockExtras& block :
       Identity{cache_salt, salt_from, extras}.encode(num_tokens, block_size)) {
    block_indices.push_back(block.block_index);
    payloads.emplace_back(block.payload.data(), block.payload.size());
    scopes.emplace_back(block.scope.data(), block.scope.size());
    first_offsets.push_back(block.first_offset);
  }
  return {block_indices, payloads, scopes, first_offsets};
}

}  // namespace

std::vector<BlockExtras> Identity::encode(size_t num_tokens, uint32_t block_size) const {
  Encoder encoder(num_tokens, block_size);
  const int64_t position = to_position(salt_from, cache_salt);
  if (!cache_salt.is_none()) {
    nb::object salt = nb::borrow(cache_salt);
    std::optional<std::string_view> bytes = bytes_of(salt);
    if (!bytes || bytes->empty() || bytes->size() > kLongestSalt) {
      salt = ExtraClasses::get().module.attr("check_salt")(cache_salt);  // has the messages
      bytes = field_bytes(salt);
    }
    encoder.add_salt(position, *bytes);
  }
  add_extras(encoder, extras);
  return encoder.finish();
}

std::vector<BlockPayload> payloads_of(const std::vector<BlockExtras>& extras) {
  std::vector<BlockPayload> payloads;
  payloads.reserve(extras.size());
  for (const BlockExtras& block : extras)
    payloads.push_back(
        {block.block_index,
         {reinterpret_cast<const uint8_t*>(block.payload.data()), block.payload.size()}});
  return payloads;
}

void bind_extras(nb::module_& m) {
  m.def("encode_extras", &encode_extras, "num_tokens"_a, "block_size"_a, "cache_salt"_a.none(),
        "salt_from"_a.none(), "extras"_a.none(), "The four lists of pagedkv.extras.BlockExtras.");
}

}  // namespace pagedkv::bindings
