use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

pub(super) fn spec(name: &str, dtype: Dtype, shape: &[u64]) -> TensorSpec {
    TensorSpec::new(name, dtype, shape)
}

pub(super) fn manifest(specs: Vec<TensorSpec>) -> Manifest {
    Manifest::new(specs, BTreeMap::new()).unwrap()
}

fn file(json: &str, data: usize) -> Vec<u8> {
    let mut f = (json.len() as u64).to_le_bytes().to_vec();
    f.extend_from_slice(json.as_bytes());
    f.resize(f.len() + data, 0);
    f
}

fn parse(json: &str, data: usize) -> Result<SafetensorsHeader, ManifestError> {
    let f = file(json, data);
    SafetensorsHeader::parse(&f, f.len() as u64)
}

#[test]
fn the_order_of_tensors_given_does_not_matter() {
    let mut specs = vec![
        spec("z", Dtype::F64, &[2]),
        spec("b", Dtype::BF16, &[3, 5]),
        spec("a", Dtype::BF16, &[7]),
        spec("u", Dtype::U8, &[1]),
        spec("f", Dtype::F32, &[]),
        spec("e", Dtype::BF16, &[0, 4]),
        spec("c", Dtype::C64, &[2]),
    ];
    let m = manifest(specs.clone());
    specs.reverse();
    assert_eq!(m, manifest(specs));
    let order: Vec<_> = m.tensors().iter().map(|t| (t.name.as_str(), t.offset, t.bytes)).collect();
    assert_eq!(
        order,
        [("c", 0, 16), ("z", 16, 16), ("f", 32, 4), ("a", 36, 14), ("b", 50, 30), ("e", 80, 0), ("u", 80, 1)]
    );
    assert_eq!(m.data_bytes(), 81);
    for (i, t) in m.tensors().iter().enumerate() {
        assert_eq!(m.find(&t.name), Some(i));
    }
    assert_eq!(m.find("nope"), None);
}

#[test]
fn the_image_header_opens_with_the_safetensors_library() {
    let aliases = BTreeMap::from([("lm_head.weight".to_owned(), "embed.weight".to_owned())]);
    let specs = Dtype::ALL.iter().map(|&d| spec(&format!("t.{d}"), d, &[4, 3]));
    let m = Manifest::new(specs.chain([spec("embed.weight", Dtype::BF16, &[2, 2])]), aliases).unwrap();
    let mut f = m.to_safetensors_header();
    assert_eq!(f.len() % 4096, 0);
    let data_start = f.len();
    f.resize(data_start + m.data_bytes() as usize, 0);
    let theirs = safetensors::SafeTensors::deserialize(&f).unwrap();
    assert_eq!(theirs.len(), m.tensors().len());
    for t in m.tensors() {
        let view = theirs.tensor(&t.name).unwrap();
        assert_eq!(view.data().len() as u64, t.bytes);
        assert_eq!(view.data().as_ptr().addr() - f.as_ptr().addr(), data_start + t.offset as usize);
    }
    let ours = SafetensorsHeader::parse(&f, f.len() as u64).unwrap();
    assert_eq!(ours.data_start, data_start as u64);
    assert_eq!(ours.manifest().unwrap(), m);
    assert_eq!(m.find("lm_head.weight"), m.find("embed.weight"));
}

#[test]
fn a_file_by_the_safetensors_library_opens_here() {
    use safetensors::tensor::TensorView;
    let data = vec![1u8; 24];
    let views = [
        ("w", TensorView::new(safetensors::Dtype::BF16, vec![3, 4], &data).unwrap()),
        ("b", TensorView::new(safetensors::Dtype::F32, vec![6], &data).unwrap()),
    ];
    let f = safetensors::serialize(views, None).unwrap();
    let h = SafetensorsHeader::parse(&f, f.len() as u64).unwrap();
    assert_eq!(h.tensors.len(), 2);
    assert_eq!(h.tensors[0].spec, spec("b", Dtype::F32, &[6]));
}

#[test]
fn every_fault_of_a_header_has_its_name() {
    use ManifestError as E;
    let t = |name: &str, dtype: &str, shape: &str, a: u64, b: u64| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{a},{b}]}}"#)
    };
    macro_rules! refuses {
        ($json:expr, $data:expr, $pattern:pat) => {
            let got = parse(&$json, $data);
            assert!(matches!(&got, Err($pattern)), "{got:?}");
        };
    }
    let a = t("a", "BF16", "[2]", 0, 4);
    refuses!(format!("{{{a},{a}}}"), 4, E::DuplicateName { .. });
    refuses!(format!("{{{a},{}}}", t("b", "U8", "[4]", 3, 7)), 7, E::Overlap { at: 3, .. });
    refuses!(format!("{{{a},{}}}", t("b", "U8", "[4]", 5, 9)), 9, E::Hole { begin: 4, end: 5, .. });
    refuses!(format!("{{{a}}}"), 5, E::DataLength { need: 4, have: 5 });
    refuses!(format!("{{{a}}}"), 3, E::DataLength { need: 4, have: 3 });
    refuses!(format!("{{{}}}", t("a", "BF16", "[3]", 0, 4)), 4, E::SizeMismatch { need: 6, .. });
    refuses!(format!("{{{}}}", t("a", "U8", "[4]", u64::MAX - 1, 2)), 4, E::SizeMismatch { .. });
    refuses!(format!("{{{}}}", t("a", "U8", "[4]", 9, 5)), 4, E::SizeMismatch { .. });
    refuses!(format!("{{{}}}", t("a", "BF99", "[2]", 0, 4)), 4, E::Dtype { .. });
    refuses!(format!("{{{}}}", t("", "BF16", "[2]", 0, 4)), 4, E::BadName { .. });
    refuses!(format!("{{{}}}", t("a\\n", "BF16", "[2]", 0, 4)), 4, E::BadName { .. });
    refuses!(format!("{{{}}}", t("a", "F4", "[3]", 0, 1)), 1, E::PartialByte { .. });
    refuses!(format!("{{{}}}", t("a", "U8", "[4294967296,4294967296]", 0, 0)), 0, E::TooLarge { .. });
    refuses!(format!("{{{}}}", t("a", "U8", "[2000000000000000]", 0, 0)), 0, E::TooLarge { .. });
    // A zero behind an overflow does not make it good.
    refuses!(format!("{{{}}}", t("a", "U8", "[4294967296,4294967296,0]", 0, 0)), 0, E::TooLarge { .. });
    let dims = format!("[{}]", vec!["1"; 65].join(","));
    refuses!(format!("{{{}}}", t("a", "U8", &dims, 0, 1)), 1, E::TooManyDims { rank: 65, .. });
    refuses!("{\"a\":{}}", 0, E::Json { .. });
    refuses!("[]", 0, E::Json { .. });
    refuses!("{", 0, E::Json { .. });
    refuses!(format!("{{{}}}", t("a", "U8", "[-1]", 0, 1)), 1, E::Json { .. });
    refuses!("{\"__metadata__\":{},\"__metadata__\":{}}", 0, E::Json { .. });
    refuses!("[".repeat(100_000), 0, E::Json { .. });
    assert!(matches!(SafetensorsHeader::parse(&[1, 2], 2), Err(E::Truncated { need: 8, have: 2 })));
    assert!(matches!(
        SafetensorsHeader::parse(&[9, 0, 0, 0, 0, 0, 0, 0], 8),
        Err(E::Truncated { need: 17, .. })
    ));
    assert!(matches!(SafetensorsHeader::parse(&[0xff; 9], 9), Err(E::HeaderTooLarge { .. })));
    let mut bad = file("{\"aa\":1}", 0);
    bad[10] = 0xff;
    assert!(matches!(SafetensorsHeader::parse(&bad, bad.len() as u64), Err(E::NotUtf8 { valid_up_to: 2 })));
}

#[test]
fn aliases_must_stand_for_a_tensor_and_have_their_own_name() {
    let with = |alias: &str, target: &str| {
        Manifest::new(
            [spec("a", Dtype::U8, &[1]), spec("b", Dtype::U8, &[1])],
            BTreeMap::from([(alias.to_owned(), target.to_owned())]),
        )
    };
    assert!(matches!(with("c", "d"), Err(ManifestError::DanglingAlias { .. })));
    assert!(matches!(with("a", "b"), Err(ManifestError::DuplicateName { .. })));
    assert!(matches!(with("__metadata__", "b"), Err(ManifestError::ReservedName)));
    assert_ne!(with("c", "a").unwrap().layout_hash(), with("c", "b").unwrap().layout_hash());
}

#[test]
fn the_layout_hash_sees_names_dtypes_and_shapes_but_not_cuts() {
    let base = manifest(vec![spec("a", Dtype::BF16, &[4, 4])]);
    for other in
        [spec("b", Dtype::BF16, &[4, 4]), spec("a", Dtype::F16, &[4, 4]), spec("a", Dtype::BF16, &[16])]
    {
        assert_ne!(base.layout_hash(), manifest(vec![other]).layout_hash());
    }
    let cuts = BTreeMap::from([("a".to_owned(), vec![DimCut { dim: 1, bounds: vec![1] }])]);
    let cut = base.clone().with_cuts(&cuts).unwrap();
    assert_eq!(base.layout_hash(), cut.layout_hash());
    assert_ne!(base.cuts_hash(), cut.cuts_hash());
    let nothing = BTreeMap::from([("a".to_owned(), vec![DimCut { dim: 1, bounds: vec![] }])]);
    assert_eq!(base.cuts_hash(), base.clone().with_cuts(&nothing).unwrap().cuts_hash());
}

#[test]
fn the_json_form_is_canonical_and_checked() {
    let m = manifest(vec![spec("w", Dtype::BF16, &[4, 6]), spec("s", Dtype::F32, &[])])
        .with_cuts(&BTreeMap::from([("w".to_owned(), vec![DimCut { dim: 0, bounds: vec![1] }])]))
        .unwrap();
    let json = m.to_json();
    assert_eq!(Manifest::from_json(json.as_bytes()).unwrap(), m);
    for (from, to) in [
        ("\"offset\":4", "\"offset\":0"),
        ("\"bytes\":48", "\"bytes\":46"),
        ("\"data_bytes\":52", "\"data_bytes\":51"),
        ("\"layout_hash\":\"", "\"layout_hash\":\"0123456789abcdef0123456789abcdef\",\"x\":\""),
        ("\"windlass_manifest\":1", "\"windlass_manifest\":2"),
        ("\"dim\":0", "\"dim\":2"),
        ("\"bounds\":[1]", "\"bounds\":[4]"),
    ] {
        assert!(json.contains(from), "{from} in {json}");
        let bad = json.replacen(from, to, 1);
        assert!(Manifest::from_json(bad.as_bytes()).is_err(), "{from} -> {to}");
    }
}

#[test]
fn a_manifest_of_a_hundred_thousand_tensors_round_trips() {
    let specs = (0..100_000).map(|i| {
        spec(
            &format!("model.layers.{}.mlp.experts.{}.up_proj.weight", i / 1000, i % 1000),
            Dtype::BF16,
            &[2048, 768],
        )
    });
    let m = Manifest::new(specs, BTreeMap::new()).unwrap();
    let header = m.to_safetensors_header();
    let len = header.len() as u64 + m.data_bytes();
    assert_eq!(SafetensorsHeader::parse(&header, len).unwrap().manifest().unwrap(), m);
    assert_eq!(Manifest::from_json(m.to_json().as_bytes()).unwrap(), m);
}

#[test]
fn too_many_tensors_are_refused() {
    let specs = (0..=MAX_TENSORS).map(|i| spec(&i.to_string(), Dtype::U8, &[]));
    assert!(matches!(Manifest::new(specs, BTreeMap::new()), Err(ManifestError::TooManyTensors { .. })));
}

#[test]
fn column_cuts_make_strided_tiles() {
    let m = manifest(vec![spec("w", Dtype::BF16, &[1000, 512])])
        .with_cuts(&BTreeMap::from([("w".to_owned(), vec![DimCut::chunked(1, 512, 2)])]))
        .unwrap();
    assert_eq!(m.cuts().blocks(), 8);
    assert_eq!(m.cuts().block(0).unwrap(), Block { tensor: 0, start: 0, run: 256, stride: 512, count: 256 });
    assert_eq!(m.cuts().block(3).unwrap().count, 1000 - 3 * 256);
    assert_eq!(m.cuts().block(4).unwrap().start, 256);
    assert!(matches!(m.cuts().block(8), Err(ManifestError::NoSuchBlock { block: 8, count: 8 })));
}

#[test]
fn cuts_of_packed_elements_keep_bytes_whole() {
    let m = manifest(vec![spec("w", Dtype::F4, &[3, 6])]);
    let cut = |bound| {
        m.clone().with_cuts(&BTreeMap::from([("w".to_owned(), vec![DimCut { dim: 1, bounds: vec![bound] }])]))
    };
    assert!(cut(2).is_ok());
    assert!(matches!(cut(3), Err(ManifestError::CutsPartialByte { bound: 3, .. })));
}

#[test]
fn chunked_cuts_are_torch_chunks() {
    assert_eq!(DimCut::chunked(0, 10, 4).bounds, [3, 6, 9]);
    assert_eq!(DimCut::chunked(0, 4, 8).bounds, [1, 2, 3]);
    assert_eq!(DimCut::chunked(0, 0, 2).bounds, [0u64; 0]);
    assert_eq!(DimCut::chunked(0, 9, 8).bounds, [2, 4, 6, 8]);
}

/// A shape and uneven cuts of some of its dimensions.
pub(super) fn shape_and_cuts() -> impl Strategy<Value = (Vec<u64>, Vec<DimCut>)> {
    prop::collection::vec(prop_oneof![1u64..6, 1u64..40, 60u64..700], 1..4).prop_flat_map(|shape| {
        let per_dim: Vec<_> = shape
            .iter()
            .map(|&size| {
                prop::collection::btree_set(1..size.max(2), 0..4)
                    .prop_map(move |b| b.into_iter().filter(|&x| x < size).collect::<Vec<_>>())
            })
            .collect();
        (Just(shape), per_dim).prop_map(|(shape, bounds)| {
            let cuts = bounds.into_iter().enumerate().map(|(dim, bounds)| DimCut { dim, bounds }).collect();
            (shape, cuts)
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn blocks_cover_each_unit_once_and_cross_no_boundary((shape, cuts) in shape_and_cuts()) {
        prop_assume!(shape.iter().product::<u64>() < 3_000_000);
        let m = manifest(vec![spec("e", Dtype::U8, &[0]), spec("w", Dtype::U8, &shape)])
            .with_cuts(&BTreeMap::from([("w".to_owned(), cuts.clone())])).unwrap();
        let units: u64 = shape.iter().product();
        let mut seen = vec![false; units as usize];
        // The owner of a unit is its tuple of intervals.
        let owner = |mut unit: u64| -> Vec<usize> {
            let mut owner = vec![0; shape.len()];
            for (d, &size) in shape.iter().enumerate().rev() {
                owner[d] = cuts[d].bounds.partition_point(|&b| b <= unit % size);
                unit /= size;
            }
            owner
        };
        for b in 0..m.cuts().blocks() {
            let block = m.cuts().block(b).unwrap();
            prop_assert!(block.units() <= BLOCK_UNITS && block.units() > 0);
            for near in 0..4 {
                prop_assert_eq!(m.cuts().tensor_of(b, near).unwrap(), block.tensor);
            }
            let first = owner(block.start);
            for local in 0..block.units() {
                let unit = block.tensor_unit(local);
                prop_assert!(!std::mem::replace(&mut seen[unit as usize], true));
                prop_assert_eq!(&owner(unit), &first);
            }
            let by_runs: Vec<u64> = block.runs().flat_map(|r| r..r + block.run).collect();
            prop_assert!(by_runs.iter().copied().eq((0..block.units()).map(|l| block.tensor_unit(l))));
        }
        prop_assert!(seen.iter().all(|&s| s));
        prop_assert!(m.cuts().tensor_of(m.cuts().blocks(), 0).is_err());
    }

    #[test]
    fn headers_of_any_bytes_end_in_a_value_or_a_named_error(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if bytes.len() > 8 {
            let len = bytes.len() as u64 - 8;
            bytes[..8].copy_from_slice(&len.to_le_bytes());
        }
        let _ = SafetensorsHeader::parse(&bytes, bytes.len() as u64);
        let _ = Manifest::from_json(&bytes);
    }
}
