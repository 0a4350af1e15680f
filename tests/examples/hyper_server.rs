//! `hyper_server`: the layer without axum, over real sockets.

use support::http::Client;

use crate::documented::Example;

#[test]
fn the_curl_lines_of_the_hyper_server_answer_as_documented() {
    let example = Example::start("hyper_server", &[]);
    example.answers_as_documented(include_str!("../../examples/hyper_server.rs"));
}

#[tokio::test]
async fn hyper_server_serves_one_request_per_resource_at_a_time() {
    let example = Example::start("hyper_server", &[]);
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(Client::connect(example.addr).await);
    }
    let videos = ["7", "7", "8"];
    let requests = clients.iter_mut().zip(videos).map(|(client, video)| {
        let path = format!("/render?video={video}");
        async move { client.request("POST", &path, &[], b"").await }
    });
    let responses = futures_util::future::join_all(requests).await;
    let mut same = [responses[0].status, responses[1].status];
    same.sort_unstable();
    assert_eq!((same, responses[2].status), ([200, 423], 200));
    let refused = responses.iter().find(|response| response.status == 423);
    assert_eq!(refused.unwrap().json()["code"], "lock-contended");
}
