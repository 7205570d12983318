//! Cases for the property `model`: the reference machine draws operations that fit what the caches hold by then.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::strategy::{NewTree, ValueTree};
use proptest::test_runner::TestRunner;
use proptest_state_machine::ReferenceStateMachine;
use turboquant_wgpu::HeadDim;

use crate::case::Case;
use crate::model::{Model, QUERY_ROOM};
use crate::sequence::{AttendFault, Blobs, CacheShape, Damage, EncodeFault, Operation, Sequence};

/// Most operations of a sequence.
const LONGEST: usize = 24;

/// Draws cases.
pub fn strategy() -> BoxedStrategy<Case> {
    Sequences.boxed()
}

/// A sequence in the making: the case without its operations, and the model after those drawn so far.
#[derive(Clone, Debug)]
struct Plan {
    case: Case,
    model: Model<()>,
}

/// Draws operations by the state of the model. No operation is rejected, whatever shrinking has made of those before
/// it: what cannot succeed has to be refused.
struct Machine;

impl ReferenceStateMachine for Machine {
    type State = Plan;
    type Transition = Operation;

    fn init_state() -> BoxedStrategy<Plan> {
        let heads = prop_oneof![4 => 1_u32..=4, 1 => Just(0)];
        let capacity = prop_oneof![4 => 1_u32..=12, 1 => 13_u32..=70];
        let cache = (prop::collection::vec(heads, 1..=4), capacity, any::<u32>()).prop_map(
            |(n_kv_heads, capacity, seed)| CacheShape {
                n_kv_heads,
                capacity,
                seed,
            },
        );
        (
            (0_usize..4, select(vec![1_u32, 2, 3, 7])),
            prop::collection::vec(cache, 1..=3),
            (super::scale(), super::gain(), super::split()),
            (super::hostile(), super::hostile(), super::moderate()),
        )
            .prop_map(
                |((head_dim, group), caches, (scale, gain, kv_split), data)| {
                    let head_dim = HeadDim::ALL[head_dim];
                    let d = head_dim.get_u32();
                    let (keys, values, queries) = data;
                    let model = Model::new(d, &caches);
                    let case = Case {
                        property: "model".to_owned(),
                        head_dim: d,
                        n_heads: group,
                        n_kv_heads: 1,
                        capacity: 1,
                        rows: 1,
                        encode_split: 1,
                        layer: 0,
                        cache_seed: 0,
                        q_rows: 0,
                        start_pos: 0,
                        q_split: 1,
                        kv_split,
                        scale: scale * head_dim.inv_sqrt(),
                        gain,
                        variant: None,
                        keys: super::fit(keys, d),
                        values: super::fit(values, d),
                        queries: super::fit(queries, d),
                        sequence: Some(Sequence {
                            caches,
                            operations: Vec::new(),
                        }),
                    };
                    Plan { case, model }
                },
            )
            .boxed()
    }

    fn transitions(plan: &Plan) -> BoxedStrategy<Operation> {
        let model = &plan.model;
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for (cache, shape) in (0..).zip(model.shapes()) {
            for layer in 0..=shape.n_kv_heads.len() as u32 {
                let at = At {
                    cache,
                    layer,
                    len: model.rows(cache, layer).len() as u32,
                    capacity: shape.capacity,
                };
                match model.heads(cache, layer) {
                    None | Some(0) => bad.push(at),
                    Some(_) => good.push(at),
                }
            }
        }
        let at = if good.is_empty() {
            select(bad).boxed()
        } else {
            prop_oneof![20 => select(good), 1 => select(bad)].boxed()
        };
        prop_oneof![
            8 => encode(at.clone()),
            6 => attend(at.clone()),
            3 => (at.clone(), any::<Index>(), 0_u32..12).prop_map(|(at, index, kind)| {
                let len = match kind {
                    0..=9 => at.len - index.index(at.len as usize + 1) as u32,
                    10 => at.len + 1,
                    _ => u32::MAX,
                };
                Operation::Truncate { cache: at.cache, layer: at.layer, len }
            }),
            1 => (at.clone(), -1_i32..=1).prop_map(|(at, by)| {
                Operation::Shift { cache: at.cache, layer: at.layer, by }
            }),
            3 => at.clone().prop_map(|at| Operation::Snapshot { cache: at.cache, layer: at.layer }),
            6 => restore(at),
            2 => Just(Operation::Submit),
        ]
        .boxed()
    }

    fn apply(mut plan: Plan, operation: &Operation) -> Plan {
        if plan.model.refusals(operation).is_empty() {
            plan.model.apply(operation, |_| ());
        }
        plan
    }
}

/// A layer as it stands.
#[derive(Clone, Copy, Debug)]
struct At {
    cache: u32,
    layer: u32,
    len: u32,
    capacity: u32,
}

fn seed() -> impl Strategy<Value = u32> {
    0_u32..1000
}

/// Something wrong, one time in ten.
fn rarely<T: Clone + std::fmt::Debug + 'static>(
    choices: Vec<T>,
) -> impl Strategy<Value = Option<T>> {
    prop_oneof![9 => Just(None), 1 => select(choices).prop_map(Some)]
}

/// Mostly appends; else overwrites, leaves a hole, or runs past the capacity.
fn encode(at: impl Strategy<Value = At> + 'static) -> BoxedStrategy<Operation> {
    let faults = rarely(vec![
        EncodeFault::ShortValues,
        EncodeFault::MisalignedKeys,
        EncodeFault::UnboundValues,
        EncodeFault::OwnBuffer,
    ]);
    (at, 0_u32..40, any::<Index>(), 0_u32..=9, seed(), faults)
        .prop_map(|(at, kind, index, rows, seed, fault)| {
            let room = at.capacity - at.len;
            let (position, rows) = match kind {
                0..=25 => (at.len, rows.min(room)),
                26..=33 => {
                    let position = index.index(at.len as usize + 1) as u32;
                    (position, rows.min(at.capacity - position))
                }
                34 => (at.len, room + 1),
                35 | 36 => (at.len + 1, rows),
                37 => (u32::MAX, rows),
                38 => (at.len, u32::MAX),
                _ => (at.len, room),
            };
            Operation::Encode {
                cache: at.cache,
                layer: at.layer,
                position,
                rows,
                seed,
                fault,
            }
        })
        .boxed()
}

/// Mostly rows that see something; else rows past what the layer holds, or more than there is room for.
fn attend(at: impl Strategy<Value = At> + 'static) -> BoxedStrategy<Operation> {
    let faults = rarely(vec![
        AttendFault::MoreRows,
        AttendFault::Foreign,
        AttendFault::Scale,
        AttendFault::ShortOutput,
        AttendFault::OwnOutput,
    ]);
    (at, 0_u32..40, any::<Index>(), 1_u32..=4, seed(), faults)
        .prop_map(|(at, kind, index, rows, seed, fault)| {
            let rows = rows.min(at.len);
            let last = at.len - rows;
            let (start_pos, rows) = match kind {
                0..=15 => (last, rows),
                16..=35 => (last - index.index(last as usize + 1) as u32, rows),
                36 => (last + 1, rows),
                37 => (u32::MAX, 1),
                38 => (0, QUERY_ROOM + 1),
                _ => (at.len, 0),
            };
            Operation::Attend {
                cache: at.cache,
                layer: at.layer,
                start_pos,
                rows,
                seed,
                fault,
            }
        })
        .boxed()
}

/// Snapshots of any layer, so that some fit and some do not; the twin's, some too long; foreign shapes; damage.
fn restore(at: impl Strategy<Value = At> + 'static) -> BoxedStrategy<Operation> {
    let damage = prop_oneof![
        3 => Just(None),
        2 => select(vec![
            Damage::NoKeys,
            Damage::NoValues,
            Damage::Neither,
            Damage::Swapped,
            Damage::ShortKeys,
            Damage::ShortValues,
            Damage::LongValues,
            Damage::Magic,
            Damage::NanResidual,
            Damage::NegativeNorm,
            Damage::OtherLength,
        ])
        .prop_map(Some),
    ];
    (at, 0_u32..20, 0_u32..=9, any::<Index>(), seed(), damage)
        .prop_map(|(at, kind, n, index, seed, damage)| {
            let twin = |rows| Blobs::Twin { rows, seed };
            let zeros = |n_kv_heads, head_dim, rows| Blobs::Zeros {
                n_kv_heads,
                head_dim,
                rows,
            };
            let blobs = match kind {
                0..=9 => Blobs::Snapshot(n),
                10..=13 => twin(index.index(at.capacity as usize + 1) as u32),
                14 => twin(at.capacity),
                15 => twin(at.capacity + 1),
                16 | 17 => zeros(n.max(1), 32 << (seed % 4), n),
                18 => zeros(n.max(1), [8, 96, 512][seed as usize % 3], n),
                _ => zeros(1, 64, at.capacity + 1),
            };
            Operation::Restore {
                cache: at.cache,
                layer: at.layer,
                blobs,
                damage,
            }
        })
        .boxed()
}

/// The machine's sequences as cases.
#[derive(Debug)]
struct Sequences;

impl Strategy for Sequences {
    type Tree = Tree;
    type Value = Case;

    fn new_tree(&self, runner: &mut TestRunner) -> NewTree<Self> {
        let tree = Machine::sequential_strategy(1..=LONGEST).new_tree(runner)?;
        // The machine's tree counts, through `current`, the operations that a test has seen, and drops the rest
        // before it shrinks. A property does not tell: all are said to be seen, and later ones go as any others do.
        let (plan, operations, seen) = tree.current();
        if let Some(seen) = seen {
            seen.store(operations.len(), Ordering::SeqCst);
        }
        Ok(Tree {
            case: case(plan, operations),
            inner: Box::new(tree),
        })
    }
}

fn case(plan: Plan, operations: Vec<Operation>) -> Case {
    let mut case = plan.case;
    if let Some(sequence) = &mut case.sequence {
        sequence.operations = operations;
    }
    case
}

type Drawn = (
    Plan,
    Vec<Operation>,
    Option<std::sync::Arc<std::sync::atomic::AtomicUsize>>,
);

/// A drawn sequence, which shrinks.
struct Tree {
    inner: Box<dyn ValueTree<Value = Drawn>>,
    case: Case,
}

impl Tree {
    fn moved(&mut self, moved: bool) -> bool {
        if moved {
            let (plan, operations, _) = self.inner.current();
            self.case = case(plan, operations);
        }
        moved
    }
}

impl ValueTree for Tree {
    type Value = Case;

    fn current(&self) -> Case {
        self.case.clone()
    }

    fn simplify(&mut self) -> bool {
        let moved = self.inner.simplify();
        self.moved(moved)
    }

    /// Where one operation cannot be complicated again the machine's tree stops; there is more to shrink after it.
    fn complicate(&mut self) -> bool {
        let moved = self.inner.complicate() || self.inner.simplify();
        self.moved(moved)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn operations(case: &Case) -> &[Operation] {
        case.sequence.as_ref().map_or(&[], |s| &s.operations)
    }

    /// The outcomes of a case's operations by the model, with the operations.
    fn replay(case: &Case) -> Vec<(Operation, Vec<&'static str>)> {
        let sequence = case.sequence.as_ref().expect("a sequence");
        let mut model = Model::new(case.head_dim, &sequence.caches);
        let run = sequence.operations.iter().map(|operation| {
            let refusals = model.refusals(operation);
            if refusals.is_empty() {
                model.apply(operation, |_| ());
            }
            (*operation, refusals)
        });
        run.collect()
    }

    /// Every operation succeeds in some sequences, and every refusal is drawn. Saved cases are the same again.
    #[test]
    fn everything_is_drawn() {
        let mut runner = TestRunner::deterministic();
        let mut seen = BTreeMap::<String, u32>::new();
        for _ in 0..1000 {
            let case = strategy().new_tree(&mut runner).expect("a case").current();
            let text = case.to_toml();
            assert_eq!(Case::from_toml(&text).as_ref(), Ok(&case), "{text}");
            for (operation, refusals) in replay(&case) {
                let debug = format!("{operation:?}");
                let kind = debug.split(' ').next().unwrap_or_default();
                let outcomes = if refusals.is_empty() {
                    vec!["succeeds"]
                } else {
                    refusals
                };
                for outcome in outcomes {
                    *seen.entry(format!("{kind}: {outcome}")).or_default() += 1;
                }
            }
        }
        for expected in [
            "Attend: AliasedBuffers",
            "Attend: BufferTooSmall",
            "Attend: ForeignRotation",
            "Attend: LayerWithoutCache",
            "Attend: NoSuchLayer",
            "Attend: NotFinite",
            "Attend: RowsOutOfRange",
            "Attend: succeeds",
            "Encode: AliasedBuffers",
            "Encode: BufferTooSmall",
            "Encode: BufferUsage",
            "Encode: Hole",
            "Encode: LayerWithoutCache",
            "Encode: MisalignedOffset",
            "Encode: NoSuchLayer",
            "Encode: RowsOutOfRange",
            "Encode: succeeds",
            "Restore: NoSuchLayer",
            "Restore: RestoreRefused: Differ",
            "Restore: RestoreRefused: ForeignShape",
            "Restore: RestoreRefused: Malformed",
            "Restore: RestoreRefused: Missing",
            "Restore: RestoreRefused: MissingBoth",
            "Restore: RestoreRefused: NoCache",
            "Restore: RestoreRefused: OverCapacity",
            "Restore: RestoreRefused: Swapped",
            "Restore: succeeds",
            "Shift: ShiftUnsupported",
            "Shift: succeeds",
            "Snapshot: NoSuchLayer",
            "Snapshot: succeeds",
            "Submit: succeeds",
            "Truncate: RowsOutOfRange",
            "Truncate: succeeds",
        ] {
            assert!(
                seen.get(expected).is_some_and(|n| *n >= 5),
                "{expected}: {seen:#?}"
            );
        }
    }

    /// A fault that takes three operations on one layer shrinks to these three.
    #[test]
    fn sequences_shrink() {
        // Fails if a layer is attended after it was truncated from three rows or more.
        let fails = |case: &Case| {
            let sequence = case.sequence.as_ref().expect("a sequence");
            let mut model = Model::new(case.head_dim, &sequence.caches);
            let mut cut = Vec::new();
            operations(case).iter().any(|operation| {
                if !model.refusals(operation).is_empty() {
                    return false;
                }
                let failed = match *operation {
                    Operation::Truncate { cache, layer, len } => {
                        let held = model.rows(cache, layer).len();
                        if held >= 3 && (len as usize) < held {
                            cut.push((model.cache(cache), layer));
                        }
                        false
                    }
                    Operation::Attend { cache, layer, .. } => {
                        cut.contains(&(model.cache(cache), layer))
                    }
                    _ => false,
                };
                model.apply(operation, |_| ());
                failed
            })
        };
        let mut runner = TestRunner::deterministic();
        let mut lengths = Vec::new();
        while lengths.len() < 20 {
            let mut tree = strategy().new_tree(&mut runner).expect("a case");
            if !fails(&tree.current()) {
                continue;
            }
            let mut best = tree.current();
            let mut moved = tree.simplify();
            let mut checks = 0;
            while moved && checks < 2000 {
                checks += 1;
                let case = tree.current();
                moved = if fails(&case) {
                    best = case;
                    tree.simplify()
                } else {
                    tree.complicate()
                };
            }
            lengths.push((operations(&best).len(), checks));
        }
        let shortest = lengths.iter().filter(|(n, _)| *n <= 4).count();
        assert!(
            shortest >= 18,
            "operations left and checks taken: {lengths:?}"
        );
    }
}
