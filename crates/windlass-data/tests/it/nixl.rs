//! Transfers whose reads fail, or cannot be made.

use std::sync::Arc;
use std::time::Duration;

use windlass_core::wire::control::RequestMode;
use windlass_data::conformance::{nixl, skipped};
use windlass_data::nixl::{Exporter, Reader};
use windlass_data::receiver::{Receiver, ReceiverConfig};
use windlass_data::serve::ServerConfig;

use crate::plane::{Publisher, config, image_bytes, odd_manifest, receiver_config, stop};

#[test]
fn a_transfer_goes_on_over_tcp_when_its_reads_fail() {
    let Ok(over_tcp) = nixl(&[("engine_config", "TLS=tcp")]).map_err(|what| skipped(&what)) else { return };
    let exporter = Arc::new(Exporter::start(&over_tcp).unwrap());
    let mut serving = ServerConfig { threads: 1, ..config() };
    serving.tcp.nixl = Some(Arc::clone(&exporter));
    let mut publisher = Publisher::with(odd_manifest(), None, serving);
    publisher.change(500);
    publisher.publish(1);
    let reader = Arc::new(Reader::start(over_tcp).unwrap());
    let config = ReceiverConfig {
        nixl: Some(Arc::clone(&reader)),
        ..receiver_config(publisher.dir.path().join("image"), RequestMode::Full)
    };
    let mut receiver = Receiver::open(config, publisher.server(), None, &stop()).unwrap();
    let first = receiver.sync(&stop()).unwrap();
    assert!(first.read_bytes > 0 && first.unread.is_none(), "{first:?}");
    assert_eq!(image_bytes(&receiver), publisher.data);

    // The sender's agent goes away between the answer to Reach and the first read, or during one.
    publisher.change(500);
    publisher.publish(2);
    let begun = std::time::Instant::now();
    let second = std::thread::scope(|scope| {
        let closing = scope.spawn(|| exporter.close());
        let second = receiver.sync(&stop()).unwrap();
        closing.join().unwrap();
        second
    });
    assert!(begun.elapsed() < Duration::from_secs(15), "it took {:?}", begun.elapsed());
    assert_eq!(image_bytes(&receiver), publisher.data);
    assert!(second.unread.is_some() || second.read_bytes > 0, "{second:?}");

    // From then on the sender says that it cannot, and the receiver says so.
    publisher.change(500);
    publisher.publish(3);
    let third = receiver.sync(&stop()).unwrap();
    let why = third.unread.as_deref().unwrap_or_default();
    assert!(third.read_bytes == 0 && !why.is_empty(), "{third:?}");
    assert_eq!(image_bytes(&receiver), publisher.data);
}

#[test]
fn peers_that_cannot_reach_each_other_by_nixl_use_tcp_and_say_why() {
    let (Ok(over_tcp), Ok(over_shm)) = (
        nixl(&[("engine_config", "TLS=tcp")]).map_err(|what| skipped(&what)),
        nixl(&[("engine_config", "TLS=shm"), ("ucx_error_handling_mode", "none")]),
    ) else {
        return;
    };
    let mut serving = config();
    serving.tcp.nixl = Some(Arc::new(Exporter::start(&over_tcp).unwrap()));
    let mut publisher = Publisher::with(odd_manifest(), None, serving);
    publisher.change(500);
    publisher.publish(1);
    let config = ReceiverConfig {
        nixl: Some(Arc::new(Reader::start(over_shm).unwrap())),
        ..receiver_config(publisher.dir.path().join("image"), RequestMode::Full)
    };
    let mut receiver = Receiver::open(config, publisher.server(), None, &stop()).unwrap();
    let synced = receiver.sync(&stop()).unwrap();
    assert!(synced.read_bytes == 0 && synced.unread.is_some(), "{synced:?}");
    assert_eq!(image_bytes(&receiver), publisher.data);
}
