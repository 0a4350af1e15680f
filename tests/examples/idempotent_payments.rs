//! `idempotent_payments` executes each payment once for any number of requests.

use crate::documented::Example;

#[test]
fn the_curl_lines_of_idempotent_payments_pay_once_each() {
    let example = Example::start("idempotent_payments", &[]);
    example.answers_as_documented(include_str!("../../examples/idempotent_payments.rs"));
}
