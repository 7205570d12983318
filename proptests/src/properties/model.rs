//! `model`: sequences of operations on several caches, against plain vectors.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use turboquant_wgpu::blob::{BlobHeader, BlobWriter, decode_kind};
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{self, AttentionShape, KeyRecord, ValueRecord};
use turboquant_wgpu::{
    Attend, Cache, CacheConfig, Error, HeadDim, Pending, Queries, Rotation, Rows, Snapshot,
};

use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{fill, output, upload, vector};
use crate::inputs::{Context, Data, generate};
use crate::model::{Model, QUERY_ROOM};
use crate::oracles::{encode_keys, encode_values};
use crate::properties::outputs::{Judge, judge, kernel_depth};
use crate::readback::{self, Readback};
use crate::sequence::{AttendFault, Blobs, CacheShape, Damage, EncodeFault, Operation};
use crate::verdict::{Evidence, Failure, Outcome, Violation};

/// Checks a sequence.
///
/// Operations are recorded into one encoder until a snapshot is needed or the sequence says so, and judged after they
/// have run by what the model held when each was recorded. At the end a snapshot of every layer is judged.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let Some(sequence) = &case.sequence else {
        return Err(Failure::NotChecked("the case has no sequence".to_owned()));
    };
    let mut run = Run::new(device, case, &sequence.caches)?;
    for (index, operation) in sequence.operations.iter().enumerate() {
        run.step(index, operation)?;
    }
    run.submit()?;
    run.everything()?;
    Ok(run.evidence)
}

/// What the model knows of a row: the vectors that it was encoded from, if it was, and its records once they have
/// been seen. Records that were judged once have to stay the same from then on.
struct Row {
    vectors: Option<Vectors>,
    seen: OnceCell<Records>,
}

/// One row, [n_kv_heads, head_dim].
struct Vectors {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// A row's records, of each KV head.
#[derive(PartialEq)]
struct Records {
    keys: Vec<KeyRecord>,
    values: Vec<ValueRecord>,
}

/// A layer as the model had it when something was recorded.
struct Held {
    place: String,
    rotation: Rotation,
    rows: Vec<Rc<Row>>,
}

/// What is to be judged once the encoder has run.
enum Due {
    /// A snapshot, kept or not, and the layer it is of.
    Snapshot(Held, Pending<Snapshot>, bool),
    /// An attention pass over a layer, whose snapshot came before it.
    Attend(Held, AttentionShape, Vec<f32>, Readback),
    /// Buffers before and after an operation that was refused.
    Refused(String, Readback, Readback),
}

struct Run<'a> {
    device: &'a Device,
    case: &'a Case,
    head_dim: HeadDim,
    caches: Vec<Cache>,
    /// A cache with a rotation that no other has.
    stranger: Cache,
    /// Scratch by number of heads, shared by all caches and layers.
    queries: BTreeMap<u32, Queries>,
    model: Model<Rc<Row>>,
    encoder: wgpu::CommandEncoder,
    due: Vec<Due>,
    /// The snapshots that the model has taken, as far as they have arrived.
    blobs: Vec<Snapshot>,
    evidence: Evidence,
}

impl<'a> Run<'a> {
    fn new(device: &'a Device, case: &'a Case, shapes: &[CacheShape]) -> Result<Self, Failure> {
        let head_dim = case.head_dim()?;
        let cache = |n_kv_heads: &[u32], capacity, seed| {
            let config = CacheConfig {
                head_dim,
                n_kv_heads: n_kv_heads.to_vec(),
                capacity,
                seed,
            };
            pollster::block_on(Cache::new(&device.gpu, config))
        };
        let caches = shapes
            .iter()
            .map(|s| cache(&s.n_kv_heads, s.capacity, u64::from(s.seed)))
            .collect::<Result<Vec<_>, _>>()?;
        for (cache, shape) in caches.iter().zip(shapes) {
            for layer in with_cache(shape) {
                for kind in [Kind::Keys, Kind::Values] {
                    fill(device, cache.buffer(layer, kind)?);
                }
            }
        }
        Ok(Self {
            device,
            case,
            head_dim,
            caches,
            // Seeds of cases are of 32 bits.
            stranger: cache(&[1], 1, 1 << 40)?,
            queries: BTreeMap::new(),
            model: Model::new(case.head_dim, shapes),
            encoder: device.encoder(),
            due: Vec::new(),
            blobs: Vec::new(),
            evidence: Evidence::default(),
        })
    }

    /// Does what an operation says, and compares with the model what can be compared at once.
    fn step(&mut self, index: usize, operation: &Operation) -> Result<(), Failure> {
        let place = format!("operation {index}");
        let refusals = self.model.refusals(operation);
        let before = match (refusals.is_empty(), *operation) {
            (false, _) => Some(self.buffers()?),
            (true, _) => None,
        };
        let done = match *operation {
            Operation::Submit => return self.submit(),
            Operation::Encode { .. } => self.encode(operation)?,
            Operation::Attend { .. } => self.attend(&place, operation)?,
            Operation::Truncate { cache, layer, len } => {
                let cache = self.model.cache(cache);
                self.caches[cache].truncate(layer, len).map(|()| Vec::new())
            }
            Operation::Shift { cache, layer, by } => {
                let cache = self.model.cache(cache);
                let shifted = self.caches[cache].shift_positions(layer, i64::from(by));
                shifted.map(|()| Vec::new())
            }
            Operation::Snapshot { cache, layer } => self.snapshot(&place, cache, layer, true),
            Operation::Restore { .. } => self.restore(operation)?,
        };
        match (before, done) {
            (None, Ok(rows)) => self.model.apply(operation, |i| rows[i].clone()),
            (None, Err(error)) => return Err(at(&place, error)),
            (Some(before), Err(error)) if refusals.contains(&&*name(&error)) => {
                let after = self.buffers()?;
                self.due.push(Due::Refused(place.clone(), before, after));
            }
            (Some(_), found) => {
                return Err(Failure::Violated(Violation {
                    rule: "what cannot be done is refused",
                    place,
                    detail: format!(
                        "{operation:?}: found {}, expected {refusals:?}",
                        found.map_or_else(
                            |e| format!("{} ({e})", name(&e)),
                            |_| "success".to_owned()
                        )
                    ),
                }));
            }
        }
        self.lengths(&place)
    }

    /// The lengths are the model's.
    fn lengths(&self, place: &str) -> Result<(), Failure> {
        for (index, (cache, shape)) in (0..).zip(self.caches.iter().zip(self.model.shapes())) {
            for layer in with_cache(shape) {
                let found = cache.len(layer)?;
                let expected = self.model.rows(index, layer).len();
                if found as usize != expected {
                    return Err(Failure::Violated(Violation {
                        rule: "length",
                        place: format!("{place}, cache {index}, layer {layer}"),
                        detail: format!("found {found}, expected {expected}"),
                    }));
                }
            }
        }
        Ok(())
    }

    /// Records copies of all buffers of all caches.
    fn buffers(&mut self) -> Result<Readback, Failure> {
        let mut buffers = Vec::new();
        for (cache, shape) in self.caches.iter().zip(self.model.shapes()) {
            for layer in with_cache(shape) {
                buffers.push(cache.buffer(layer, Kind::Keys)?);
                buffers.push(cache.buffer(layer, Kind::Values)?);
            }
        }
        // A readback of nothing would map nothing.
        if buffers.is_empty() {
            buffers.push(self.stranger.buffer(0, Kind::Keys)?);
        }
        let gpu = &self.device.gpu;
        Ok(readback::record(gpu, &mut self.encoder, &buffers))
    }

    /// `rows` rows of keys and values for a layer.
    fn vectors(
        &self,
        rotation: &Rotation,
        heads: u32,
        rows: u32,
        seed: u32,
    ) -> Result<Vectors, Failure> {
        let context = Context {
            rotation,
            rows,
            heads,
        };
        let drawn = |data: &Data| generate(&seeded(data, seed), &context);
        Ok(Vectors {
            keys: drawn(&self.case.keys)?,
            values: drawn(&self.case.values)?,
        })
    }

    fn rotation(&self, cache: u32, layer: u32) -> Rotation {
        let shape = &self.model.shapes()[self.model.cache(cache)];
        Rotation::new(self.head_dim, u64::from(shape.seed), layer)
    }

    fn held(&self, place: &str, cache: u32, layer: u32) -> Held {
        Held {
            place: format!("{place}, cache {}, layer {layer}", self.model.cache(cache)),
            rotation: self.rotation(cache, layer),
            rows: self.model.rows(cache, layer).to_vec(),
        }
    }

    fn encode(&mut self, operation: &Operation) -> Result<Done, Failure> {
        let Operation::Encode {
            cache,
            layer,
            position,
            rows,
            seed,
            fault,
        } = *operation
        else {
            return Ok(Ok(Vec::new()));
        };
        let heads = self.model.heads(cache, layer).unwrap_or(0).max(1);
        let index = self.model.cache(cache);
        // Rows past the capacity are refused before anyone looks at the buffers.
        let drawn = rows.min(self.model.shapes()[index].capacity);
        let rotation = self.rotation(cache, layer);
        let vectors = self.vectors(&rotation, heads, drawn, seed)?;
        let row = heads as usize * self.head_dim.get();
        let shown = |data: &[f32]| upload(self.device, if data.is_empty() { &[0.0] } else { data });
        let (mut keys, mut values) = (shown(&vectors.keys), shown(&vectors.values));
        let mut offset = 0;
        match fault {
            Some(EncodeFault::ShortValues) if drawn > 0 => {
                values = shown(&vectors.values[..drawn as usize * row - 1]);
            }
            Some(EncodeFault::MisalignedKeys) => {
                keys = shown(&[&vectors.keys[..], &[0.0]].concat());
                offset = 2;
            }
            Some(EncodeFault::UnboundValues) => values = unbound(self.device, values.size()),
            Some(EncodeFault::OwnBuffer) => {
                if let Ok(own) = self.caches[index].buffer(layer, Kind::Keys) {
                    keys = own.clone();
                }
            }
            Some(EncodeFault::ShortValues) | None => {}
        }
        let keys = Rows {
            buffer: &keys,
            offset,
        };
        let done = self.caches[index].encode(
            &mut self.encoder,
            layer,
            keys,
            (&values).into(),
            rows,
            position,
        );
        Ok(done.map(|()| {
            let rows = vectors
                .keys
                .chunks_exact(row)
                .zip(vectors.values.chunks_exact(row));
            rows.map(|(keys, values)| {
                Rc::new(Row {
                    vectors: Some(Vectors {
                        keys: keys.to_vec(),
                        values: values.to_vec(),
                    }),
                    seen: OnceCell::new(),
                })
            })
            .collect()
        }))
    }

    fn attend(&mut self, place: &str, operation: &Operation) -> Result<Done, Failure> {
        let Operation::Attend {
            cache,
            layer,
            start_pos,
            rows,
            seed,
            fault,
        } = *operation
        else {
            return Ok(Ok(Vec::new()));
        };
        let heads = self.model.heads(cache, layer).unwrap_or(0).max(1);
        let n_heads = heads * (self.case.n_heads / self.case.n_kv_heads);
        let context = Context {
            rotation: &self.rotation(cache, layer),
            rows: rows.min(QUERY_ROOM),
            heads: n_heads,
        };
        let q = generate(&seeded(&self.case.queries, seed), &context)?;
        let gpu = &self.device.gpu;
        let elements = q.len().max(n_heads as usize * self.head_dim.get());
        let source = upload(self.device, if q.is_empty() { &[0.0] } else { &q });
        let short = usize::from(fault == Some(AttendFault::ShortOutput));
        let mut out = output(self.device, elements - short);
        let scratch = match self.queries.entry(n_heads) {
            std::collections::btree_map::Entry::Occupied(held) => held.into_mut(),
            std::collections::btree_map::Entry::Vacant(free) => {
                free.insert(Queries::new(gpu, self.head_dim, n_heads, QUERY_ROOM)?)
            }
        };
        if fault == Some(AttendFault::OwnOutput) {
            out = scratch.buffer().clone();
        }
        let more = u32::from(fault == Some(AttendFault::MoreRows));
        let attend = Attend {
            rows: 0..rows + more,
            start_pos,
            split: self.case.kv_split(),
            scale: if fault == Some(AttendFault::Scale) {
                f32::NAN
            } else {
                self.case.scale
            },
            gain: self.case.gain,
        };
        let index = self.model.cache(cache);
        let found = &self.caches[index];
        let encoder = &mut self.encoder;
        let done = found
            .rotate(encoder, layer, (&source).into(), rows, scratch)
            .and_then(|()| match fault {
                Some(AttendFault::Foreign) => {
                    let source = (&source).into();
                    let foreign = &self.stranger;
                    foreign.rotate(encoder, 0, source, rows, scratch)
                }
                _ => Ok(()),
            })
            .and_then(|()| found.attend(encoder, layer, scratch, (&out).into(), &attend));
        if let Err(error) = done {
            return Ok(Err(error));
        }
        if rows > 0 {
            // The records that the rows see are judged before what is computed from them.
            if let Err(error) = self.snapshot(place, cache, layer, false) {
                return Ok(Err(error));
            }
            let shape = AttentionShape {
                rows,
                n_heads,
                start_pos,
                scale: self.case.scale,
                gain: self.case.gain,
            };
            let read = readback::record(gpu, &mut self.encoder, &[&out]);
            let held = self.held(place, cache, layer);
            self.due.push(Due::Attend(held, shape, q, read));
        }
        Ok(Ok(Vec::new()))
    }

    fn snapshot(&mut self, place: &str, cache: u32, layer: u32, keep: bool) -> Done {
        let index = self.model.cache(cache);
        let pending = self.caches[index].snapshot(&mut self.encoder, layer)?;
        let held = self.held(place, cache, layer);
        self.due.push(Due::Snapshot(held, pending, keep));
        Ok(Vec::new())
    }

    fn restore(&mut self, operation: &Operation) -> Result<Done, Failure> {
        let Operation::Restore {
            cache,
            layer,
            blobs,
            damage,
        } = *operation
        else {
            return Ok(Ok(Vec::new()));
        };
        let shape = self.model.blob_shape(cache, layer, blobs);
        let snapshot = match blobs {
            Blobs::Snapshot(index) => match self.model.snapshot(index) {
                Some(i) => {
                    if i >= self.blobs.len() {
                        self.submit()?;
                    }
                    self.blobs[i].clone()
                }
                None => zeros(shape.n_kv_heads, shape.head_dim, 0)?,
            },
            Blobs::Twin { rows, seed } => {
                let rotation = self.rotation(cache, layer);
                let vectors = self.vectors(&rotation, shape.n_kv_heads, rows, seed)?;
                twin::snapshot(&rotation, shape.n_kv_heads, &vectors.keys, &vectors.values)?.0
            }
            Blobs::Zeros { .. } => zeros(shape.n_kv_heads, shape.head_dim, shape.rows)?,
        };
        let (keys, values) = match damage {
            None => (snapshot.keys.clone(), snapshot.values.clone()),
            Some(Damage::OtherLength) => {
                let longer = zeros(shape.n_kv_heads, shape.head_dim, shape.rows + 1)?;
                (snapshot.keys.clone(), longer.values)
            }
            Some(damage) => damaged(damage, &snapshot, shape.rows),
        };
        let index = self.model.cache(cache);
        let done = self.caches[index].restore(&mut self.encoder, layer, &keys, &values);
        Ok(match done {
            Err(error) => Err(error),
            Ok(rows) if rows != shape.rows => {
                return Err(Failure::Violated(Violation {
                    rule: "restored length",
                    place: format!("cache {index}, layer {layer}"),
                    detail: format!("found {rows}, expected {}", shape.rows),
                }));
            }
            Ok(_) => {
                let rows = records(self.head_dim, &snapshot)?;
                Ok(rows
                    .into_iter()
                    .map(|records| {
                        Rc::new(Row {
                            vectors: None,
                            seen: OnceCell::from(records),
                        })
                    })
                    .collect())
            }
        })
    }

    /// Submits what has been recorded and judges it.
    fn submit(&mut self) -> Result<(), Failure> {
        let encoder = std::mem::replace(&mut self.encoder, self.device.encoder());
        self.device.submit(encoder);
        for due in std::mem::take(&mut self.due) {
            match due {
                Due::Snapshot(held, pending, keep) => {
                    let arrived = self.device.wait(pending);
                    let snapshot = arrived.map_err(|e| at(&held.place, e))?;
                    self.judge_snapshot(&held, &snapshot)?;
                    if keep {
                        self.blobs.push(snapshot);
                    }
                }
                Due::Attend(held, shape, queries, read) => {
                    let words = read.wait(&self.device.gpu)?.remove(0);
                    let out: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
                    self.judge_attention(&held, shape, &queries, &out)?;
                }
                Due::Refused(place, before, after) => {
                    let before = before.wait(&self.device.gpu)?;
                    if before != after.wait(&self.device.gpu)? {
                        return Err(Failure::Violated(Violation {
                            rule: "what is refused changes no bit",
                            place,
                            detail: "found other words in a cache's buffers".to_owned(),
                        }));
                    }
                }
            }
        }
        match self.device.take_errors().into_iter().next() {
            Some(error) => Err(Error::Rejected(error).into()),
            None => Ok(()),
        }
    }

    /// Judges a snapshot of every layer.
    fn everything(&mut self) -> Result<(), Failure> {
        let shapes = self.model.shapes().to_vec();
        for (cache, shape) in (0..).zip(&shapes) {
            for layer in with_cache(shape) {
                self.snapshot("the end", cache, layer, false)?;
            }
        }
        self.submit()
    }

    /// Records that have been seen before are the same; others are right for their vectors.
    fn judge_snapshot(&mut self, held: &Held, snapshot: &Snapshot) -> Result<(), Failure> {
        let found = records(self.head_dim, snapshot)?;
        let violated = |rule, place, detail| {
            Failure::Violated(Violation {
                rule,
                place,
                detail,
            })
        };
        if found.len() != held.rows.len() {
            let detail = format!("found {}, expected {}", found.len(), held.rows.len());
            return Err(violated("length of a snapshot", held.place.clone(), detail));
        }
        for (t, (row, found)) in held.rows.iter().zip(found).enumerate() {
            let place = format!("{}, timestep {t}", held.place);
            if let Some(seen) = row.seen.get() {
                if *seen != found {
                    let detail = "found other records than before".to_owned();
                    return Err(violated("records stay as they were", place, detail));
                }
                self.evidence.compared += 1;
                continue;
            }
            let Some(vectors) = &row.vectors else {
                continue;
            };
            let (arithmetic, rotation) = (self.device.arithmetic, &held.rotation);
            for (head, (key, value)) in found.keys.iter().zip(&found.values).enumerate() {
                let place = format!("{place}, head {head}");
                let x = vector(&vectors.keys, self.head_dim, head);
                encode_keys::judge(arithmetic, rotation, x, key, &mut self.evidence, &place)?;
                let x = vector(&vectors.values, self.head_dim, head);
                encode_values::judge(arithmetic, rotation, x, value, &mut self.evidence, &place)?;
            }
            // It was empty a moment ago.
            let _ = row.seen.set(found);
        }
        Ok(())
    }

    fn judge_attention(
        &mut self,
        held: &Held,
        shape: AttentionShape,
        queries: &[f32],
        out: &[f32],
    ) -> Result<(), Failure> {
        let seen: Vec<&Records> = held.rows.iter().filter_map(|r| r.seen.get()).collect();
        let heads = seen.first().map_or(0, |r| r.keys.len());
        let keys: Vec<Vec<KeyRecord>> = (0..heads)
            .map(|h| seen.iter().map(|r| r.keys[h].clone()).collect())
            .collect();
        let values: Vec<Vec<ValueRecord>> = (0..heads)
            .map(|h| seen.iter().map(|r| r.values[h].clone()).collect())
            .collect();
        let attended = Judge::new(
            self.device.arithmetic,
            &held.rotation,
            &keys,
            &values,
            shape,
        );
        let depth = kernel_depth(self.device, self.case)?;
        let references = attended.references(attended.rotate(queries), depth);
        let rule = "attention over the model's rows";
        let (evidence, n_heads) = (&mut self.evidence, shape.n_heads);
        judge(rule, evidence, &references, n_heads, out, &held.place)?;
        Ok(())
    }
}

/// An error of the library, with its place.
fn at(place: &str, error: Error) -> Failure {
    match Failure::from(error) {
        Failure::Violated(violation) => Failure::Violated(Violation {
            place: place.to_owned(),
            ..violation
        }),
        other => other,
    }
}

/// What an operation wrote, or the library's error.
type Done = Result<Vec<Rc<Row>>, Error>;

/// Layers that have a cache.
fn with_cache(shape: &CacheShape) -> impl Iterator<Item = u32> + '_ {
    let layers = (0..).zip(&shape.n_kv_heads);
    layers
        .filter(|(_, heads)| **heads > 0)
        .map(|(layer, _)| layer)
}

fn seeded(data: &Data, seed: u32) -> Data {
    Data {
        seed: data.seed.wrapping_add(u64::from(seed)),
        ..data.clone()
    }
}

/// A buffer that can be copied from but not bound.
fn unbound(device: &Device, size: u64) -> wgpu::Buffer {
    device.gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: Some("unbound"),
        size,
        usage: wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    })
}

/// The records of a pair of blobs, row after row.
fn records(head_dim: HeadDim, snapshot: &Snapshot) -> Result<Vec<Records>, Failure> {
    let keys = decode_kind(Kind::Keys, &snapshot.keys).map_err(Error::from)?;
    let values = decode_kind(Kind::Values, &snapshot.values).map_err(Error::from)?;
    let rows = keys.header().seq_len as usize;
    let keys = KeyRecord::read_all(&keys, head_dim);
    let values = ValueRecord::read_all(&values, head_dim);
    Ok((0..rows)
        .map(|t| Records {
            keys: keys.iter().skip(t).step_by(rows).cloned().collect(),
            values: values.iter().skip(t).step_by(rows).cloned().collect(),
        })
        .collect())
}

/// Blobs of zero records.
fn zeros(n_kv_heads: u32, head_dim: u32, seq_len: u32) -> Result<Snapshot, Failure> {
    let blob = |kind| {
        let header = BlobHeader {
            kind,
            n_kv_heads,
            head_dim,
            seq_len,
        };
        let written = BlobWriter::new(header).and_then(BlobWriter::finish);
        written.map_err(|e| Failure::from(Error::from(e)))
    };
    Ok(Snapshot {
        keys: blob(Kind::Keys)?,
        values: blob(Kind::Values)?,
    })
}

fn damaged(damage: Damage, snapshot: &Snapshot, rows: u32) -> (Vec<u8>, Vec<u8>) {
    let (mut keys, mut values) = (snapshot.keys.clone(), snapshot.values.clone());
    // Both kinds of blob end with a norm.
    let last = |blob: &mut Vec<u8>, bits: u16| {
        if rows > 0 {
            blob.truncate(blob.len() - 2);
            blob.extend(bits.to_le_bytes());
        }
    };
    match damage {
        Damage::NoKeys => keys.clear(),
        Damage::NoValues => values.clear(),
        Damage::Neither => {
            keys.clear();
            values.clear();
        }
        Damage::Swapped => std::mem::swap(&mut keys, &mut values),
        Damage::ShortKeys => keys.truncate(keys.len() - 1),
        Damage::ShortValues => values.truncate(values.len() - 1),
        Damage::LongValues => values.push(0),
        Damage::Magic => keys[3] = b'2',
        Damage::NanResidual => last(&mut keys, 0x7e01),
        Damage::NegativeNorm => last(&mut values, 0x8000),
        Damage::OtherLength => {}
    }
    (keys, values)
}

/// The name of an error's variant, the gate's reason with it.
fn name(error: &Error) -> String {
    let variant = |debug: String| {
        let end = debug.find(|c: char| !c.is_alphanumeric());
        debug[..end.unwrap_or(debug.len())].to_owned()
    };
    match error {
        Error::RestoreRefused { reason, .. } => {
            format!("RestoreRefused: {}", variant(format!("{reason:?}")))
        }
        other => variant(format!("{other:?}")),
    }
}
