//! The model of a cache that the property `model` compares with: plain vectors of rows, and what has to be refused.

use crate::sequence::{AttendFault, Blobs, CacheShape, Damage, EncodeFault, Operation};

/// Query rows that a scratch object has room for.
pub const QUERY_ROOM: u32 = 8;

/// Every layer's rows, and every snapshot's. What a row is, is the user's affair: nothing for the strategy that
/// draws sequences, vectors and records for the property that judges them.
#[derive(Clone, Debug)]
pub struct Model<T> {
    head_dim: u32,
    shapes: Vec<CacheShape>,
    rows: Vec<Vec<Vec<T>>>,
    taken: Vec<Taken<T>>,
}

/// A snapshot.
#[derive(Clone, Debug)]
pub struct Taken<T> {
    /// KV heads of its layer.
    pub n_kv_heads: u32,
    /// Its rows.
    pub rows: Vec<T>,
}

/// The shape of a pair of blobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobShape {
    /// KV heads.
    pub n_kv_heads: u32,
    /// Elements of a vector.
    pub head_dim: u32,
    /// Timesteps.
    pub rows: u32,
}

impl<T: Clone> Model<T> {
    /// Empty caches.
    #[must_use]
    pub fn new(head_dim: u32, shapes: &[CacheShape]) -> Self {
        Self {
            head_dim,
            shapes: shapes.to_vec(),
            rows: shapes
                .iter()
                .map(|s| vec![Vec::new(); s.n_kv_heads.len()])
                .collect(),
            taken: Vec::new(),
        }
    }

    /// Index of the cache that an operation means.
    #[must_use]
    pub fn cache(&self, cache: u32) -> usize {
        cache as usize % self.shapes.len()
    }

    /// The caches.
    #[must_use]
    pub fn shapes(&self) -> &[CacheShape] {
        &self.shapes
    }

    /// KV heads of a layer, if there is one: 0 if it has no cache.
    #[must_use]
    pub fn heads(&self, cache: u32, layer: u32) -> Option<u32> {
        let heads = &self.shapes[self.cache(cache)].n_kv_heads;
        heads.get(layer as usize).copied()
    }

    /// What a layer holds; nothing if there is no such layer.
    #[must_use]
    pub fn rows(&self, cache: u32, layer: u32) -> &[T] {
        let layers = &self.rows[self.cache(cache)];
        layers.get(layer as usize).map_or(&[], Vec::as_slice)
    }

    /// The snapshots so far.
    #[must_use]
    pub fn taken(&self) -> &[Taken<T>] {
        &self.taken
    }

    /// Index of the snapshot that a restore means, if there is any.
    #[must_use]
    pub fn snapshot(&self, index: u32) -> Option<usize> {
        (index as usize).checked_rem(self.taken.len())
    }

    /// The shape of the blobs that a restore brings, before any damage.
    #[must_use]
    pub fn blob_shape(&self, cache: u32, layer: u32, blobs: Blobs) -> BlobShape {
        let own = |rows| BlobShape {
            n_kv_heads: self.heads(cache, layer).unwrap_or(0).max(1),
            head_dim: self.head_dim,
            rows,
        };
        match blobs {
            Blobs::Snapshot(index) => match self.snapshot(index) {
                None => own(0),
                Some(i) => BlobShape {
                    n_kv_heads: self.taken[i].n_kv_heads,
                    ..own(self.taken[i].rows.len() as u32)
                },
            },
            Blobs::Twin { rows, .. } => own(rows),
            Blobs::Zeros {
                n_kv_heads,
                head_dim,
                rows,
            } => BlobShape {
                n_kv_heads,
                head_dim,
                rows,
            },
        }
    }

    /// The errors that an operation may be refused with; none if it has to succeed. Where several things are wrong any
    /// of them may be named, but for the restore gate, whose order is documented.
    #[must_use]
    pub fn refusals(&self, operation: &Operation) -> Vec<&'static str> {
        let mut refusals = Vec::new();
        let mut refuse = |when: bool, name| {
            if when {
                refusals.push(name);
            }
        };
        let (cache, layer) = match *operation {
            Operation::Submit => return refusals,
            Operation::Encode { cache, layer, .. }
            | Operation::Attend { cache, layer, .. }
            | Operation::Truncate { cache, layer, .. }
            | Operation::Shift { cache, layer, .. }
            | Operation::Snapshot { cache, layer }
            | Operation::Restore { cache, layer, .. } => (cache, layer),
        };
        let gate = matches!(operation, Operation::Restore { .. });
        let heads = match self.heads(cache, layer) {
            None => return vec!["NoSuchLayer"],
            Some(0) if gate => return vec!["RestoreRefused: NoCache"],
            Some(0) => return vec!["LayerWithoutCache"],
            Some(heads) => heads,
        };
        let len = self.rows(cache, layer).len() as u64;
        let capacity = u64::from(self.shapes[self.cache(cache)].capacity);
        match *operation {
            Operation::Encode {
                position,
                rows,
                fault,
                ..
            } => {
                let (position, rows) = (u64::from(position), u64::from(rows));
                refuse(position + rows > capacity, "RowsOutOfRange");
                refuse(position > len, "Hole");
                if let Some(fault) = fault.filter(|_| rows > 0) {
                    let name = match fault {
                        EncodeFault::ShortValues => "BufferTooSmall",
                        EncodeFault::MisalignedKeys => "MisalignedOffset",
                        EncodeFault::UnboundValues => "BufferUsage",
                        EncodeFault::OwnBuffer => "AliasedBuffers",
                    };
                    refuse(true, name);
                }
            }
            Operation::Attend {
                start_pos,
                rows,
                fault,
                ..
            } => {
                let end = u64::from(start_pos) + u64::from(rows);
                refuse(rows > QUERY_ROOM, "RowsOutOfRange");
                refuse(rows > 0 && end > len, "RowsOutOfRange");
                match fault {
                    Some(AttendFault::MoreRows) => refuse(true, "RowsOutOfRange"),
                    Some(AttendFault::Foreign) => refuse(true, "ForeignRotation"),
                    Some(AttendFault::Scale) => refuse(true, "NotFinite"),
                    Some(AttendFault::ShortOutput) => refuse(rows > 0, "BufferTooSmall"),
                    Some(AttendFault::OwnOutput) => refuse(rows > 0, "AliasedBuffers"),
                    None => {}
                }
            }
            Operation::Truncate { len: to, .. } => refuse(u64::from(to) > len, "RowsOutOfRange"),
            Operation::Shift { by, .. } => refuse(by != 0, "ShiftUnsupported"),
            Operation::Restore { blobs, damage, .. } => {
                let shape = self.blob_shape(cache, layer, blobs);
                let name = match damage {
                    Some(Damage::Neither) => Some("RestoreRefused: MissingBoth"),
                    Some(Damage::NoKeys | Damage::NoValues) => Some("RestoreRefused: Missing"),
                    Some(Damage::Swapped) => Some("RestoreRefused: Swapped"),
                    Some(
                        Damage::ShortKeys
                        | Damage::ShortValues
                        | Damage::LongValues
                        | Damage::Magic,
                    ) => Some("RestoreRefused: Malformed"),
                    Some(Damage::NanResidual | Damage::NegativeNorm) if shape.rows > 0 => {
                        Some("RestoreRefused: Malformed")
                    }
                    Some(Damage::OtherLength) => Some("RestoreRefused: Differ"),
                    _ if shape.n_kv_heads != heads || shape.head_dim != self.head_dim => {
                        Some("RestoreRefused: ForeignShape")
                    }
                    _ if u64::from(shape.rows) > capacity => Some("RestoreRefused: OverCapacity"),
                    _ => None,
                };
                return name.into_iter().collect();
            }
            Operation::Snapshot { .. } | Operation::Submit => {}
        }
        refusals
    }

    /// Carries out an operation that is not refused. `row` makes the i-th of the rows that it writes.
    pub fn apply(&mut self, operation: &Operation, row: impl FnMut(usize) -> T) {
        match *operation {
            Operation::Encode {
                cache,
                layer,
                position,
                rows,
                ..
            } => {
                let cache = self.cache(cache);
                let held = &mut self.rows[cache][layer as usize];
                let kept = held.split_off((position as usize + rows as usize).min(held.len()));
                held.truncate(position as usize);
                held.extend((0..rows as usize).map(row));
                held.extend(kept);
            }
            Operation::Truncate { cache, layer, len } => {
                let cache = self.cache(cache);
                self.rows[cache][layer as usize].truncate(len as usize);
            }
            Operation::Snapshot { cache, layer } => {
                let taken = Taken {
                    n_kv_heads: self.heads(cache, layer).unwrap_or(0),
                    rows: self.rows(cache, layer).to_vec(),
                };
                self.taken.push(taken);
            }
            Operation::Restore {
                cache,
                layer,
                blobs,
                ..
            } => {
                let rows = self.blob_shape(cache, layer, blobs).rows as usize;
                let cache = self.cache(cache);
                self.rows[cache][layer as usize] = (0..rows).map(row).collect();
            }
            Operation::Attend { .. } | Operation::Shift { .. } | Operation::Submit => {}
        }
    }
}
