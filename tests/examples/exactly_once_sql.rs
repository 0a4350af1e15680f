//! `exactly_once_sql`: executed twice, booked once.

use crate::documented::Example;
use crate::support::http::request;

#[test]
fn the_curl_lines_of_exactly_once_sql_book_once() {
    let example = Example::start("exactly_once_sql", &[]);
    example.answers_as_documented(include_str!("../../examples/exactly_once_sql.rs"));
}

#[tokio::test]
async fn retries_of_payments_that_failed_book_each_once() {
    let example = Example::start("exactly_once_sql", &[]);
    let pay = async |number: u32, fail: &str| {
        let key = format!("key-{number}");
        let path = format!("/payments?amount=1{fail}");
        request(
            example.addr,
            "POST",
            &path,
            &[("idempotency-key", &key)],
            b"",
        )
        .await
    };
    for number in 0..10 {
        for _ in 0..3 {
            assert_eq!(pay(number, "&fail=true").await.status, 503);
        }
        let first = pay(number, "").await;
        assert_eq!(first.json()["executions"], 4);
        assert_eq!(first.json()["balance"], 99 - number);
        let replayed = pay(number, "").await;
        assert_eq!(replayed.header("idempotency-replayed"), Some("true"));
        assert_eq!(replayed.body, first.body);
    }
}
