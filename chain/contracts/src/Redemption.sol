// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {CfaToken} from "./CfaToken.sol";
import {REDEEM, Roles} from "./Roles.sol";

/// Pays holders from one account and burns the units that the payment redeems: maturity and
/// buy-back burn units, a coupon burns none.
///
/// Long lists are split into parts of at most `HOLDERS_MAX` holders. The parts of a distribution
/// are accepted in order and once, are of one token, and each is atomic. A frozen holder is paid
/// and its units are burned: the claim ends with the issue, and the money stays frozen at the same
/// address.
contract Redemption is Roles {
    struct Progress {
        address token;
        uint96 parts;
    }

    uint256 public constant HOLDERS_MAX = 256;

    CfaToken public immutable money;

    mapping(bytes32 distributionId => Progress) private progress;

    event Distributed(
        bytes32 indexed distributionId, address indexed token, address indexed holder, uint256 units, uint256 payment
    );
    event PartDistributed(bytes32 indexed distributionId, uint256 part, uint256 units, uint256 paid);

    error WrongPart(uint256 expected, uint256 given);
    error WrongToken(address expected, address given);
    error Underfunded(uint256 balance, uint256 needed);
    error MalformedPart();

    constructor(CfaToken money_, address owner_, address[] memory accounts, uint256[] memory roles)
        Roles(owner_, accounts, roles)
    {
        money = money_;
    }

    /// Number of accepted parts.
    function partsDone(bytes32 distributionId) external view returns (uint256) {
        return progress[distributionId].parts;
    }

    /// `account` pays: the issue's redemption account, or the issuer's for a single buyback. A
    /// holder with 0 units keeps its units; one with payment 0 is not paid.
    function distribute(
        bytes32 distributionId,
        uint256 part,
        CfaToken token,
        address account,
        address[] calldata holders,
        uint256[] calldata units,
        uint256[] calldata payments
    ) external onlyRole(REDEEM) {
        _accept(distributionId, part, address(token));
        uint256 count = holders.length;
        if (count == 0 || count > HOLDERS_MAX || count != units.length || count != payments.length) {
            revert MalformedPart();
        }
        uint256 needed = 0;
        for (uint256 i = 0; i < count; ++i) needed += payments[i];
        uint256 balance = money.balanceOf(account);
        if (balance < needed) revert Underfunded(balance, needed);
        uint256 burned = 0;
        for (uint256 i = 0; i < count; ++i) {
            if (payments[i] != 0) money.payHolder(account, holders[i], payments[i]);
            if (units[i] != 0) token.burn(holders[i], units[i]);
            burned += units[i];
            emit Distributed(distributionId, address(token), holders[i], units[i], payments[i]);
        }
        emit PartDistributed(distributionId, part, burned, needed);
    }

    function _accept(bytes32 distributionId, uint256 part, address token) private {
        Progress memory done = progress[distributionId];
        if (part != done.parts) revert WrongPart(done.parts, part);
        if (part != 0 && token != done.token) revert WrongToken(done.token, token);
        progress[distributionId] = Progress(token, done.parts + 1);
    }
}
